"""Executes lowered descriptors on a CPU: virtual SMs, counters, ticket queues, paged KV, in a seeded interleaving."""

from mk.interpreter.machine import Machine
from mk.interpreter.sms import Stalled
from mk.interpreter.step import Status, StepInputs, StepOutputs

__all__ = ["Machine", "Stalled", "Status", "StepInputs", "StepOutputs"]
