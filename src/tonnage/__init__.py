"""Fine-tune language models, whole or by adapters, on the hardware people have.

    plan        what a run would do: where every byte and second goes
    train       a run, to its end
    start       a run, step by step
    open_run    a run that is there
    Run         what these return: metrics, config, plan, export; generate, resume, stop
    Plan        what was decided
    Session     steps of your own, in this process
    UserError   what you can mend, all of it at once

The command line (``tonnage --help``) does the same. Nothing is loaded before it is asked for, so ``import tonnage`` is
instant. docs/python.md says more; what each room of the code is for and who may use whom stands in docs/rooms.md.
"""

import sys
import warnings
from typing import TYPE_CHECKING

if sys.platform == "win32":
    raise ImportError(
        "found Windows, needed Linux or macOS: install tonnage inside WSL 2 (`wsl --install`), or use a container"
    )
if "ipykernel" in sys.modules:  # tqdm, which transformers loads, asks for widgets; progress is drawn without them here
    warnings.filterwarnings("ignore", "IProgress not found")

__version__ = "0.1.0"
__all__ = ["Plan", "Run", "Session", "UserError", "__version__", "open_run", "plan", "start", "train"]

if TYPE_CHECKING:
    from tonnage.api.names import plan as plan
    from tonnage.api.names import start as start
    from tonnage.api.names import train as train
    from tonnage.api.run import Run as Run
    from tonnage.api.run import open_run as open_run
    from tonnage.api.session import Session as Session
    from tonnage.errors import UserError as UserError
    from tonnage.planning.plan import Plan as Plan
else:
    _HOMES = {
        "Plan": "tonnage.planning.plan",
        "Run": "tonnage.api.run",
        "Session": "tonnage.api.session",
        "UserError": "tonnage.errors",
        "open_run": "tonnage.api.run",
        "plan": "tonnage.api.names",
        "start": "tonnage.api.names",
        "train": "tonnage.api.names",
    }

    def __getattr__(name: str) -> object:
        """A public name, loaded now."""
        from importlib import import_module

        if name not in _HOMES:
            raise AttributeError(f"module 'tonnage' has no attribute {name!r}")
        found = globals()[name] = getattr(import_module(_HOMES[name]), name)
        return found

    def __dir__() -> list[str]:
        """The public names, for those who look what there is."""
        return sorted({*globals(), *__all__})
