"""The discrete-event model behind `mk/schedule/simulate.py`: what is executed, by whom, and what held the step up."""
