"""The typed fields of each experiment: `train_nano` has the dataclass `TrainNano`, and so on.

They stand here, apart from the code they steer, so that composing a configuration never waits for a heavy import. Like
every schema they hold types; the values stand in configs/experiment/<name>.yaml. An experiment has no field that it
does not read: a key that would change nothing is an unknown one.
"""

from __future__ import annotations

from experiments.settings.decode import *  # noqa: F403
from experiments.settings.kernel import *  # noqa: F403
from experiments.settings.models import *  # noqa: F403
from experiments.settings.prefill import *  # noqa: F403
from experiments.settings.serving import *  # noqa: F403
