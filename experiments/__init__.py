"""One experiment, one file: experiments/<name>.py has `main(cfg)`, and its rows make one table or figure.

Its fields are a dataclass of experiments/settings, their values configs/experiment/<name>.yaml; the first line of
its docstring is its line in `python run.py --help`. An experiment uses `mk`, it never changes it.
"""
