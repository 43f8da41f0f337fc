"""The config: what to train, on what data, with what hardware; read once, strictly, then frozen.

``schema`` says what may be written, ``read`` reads it and reports every problem with its line, ``values`` makes
overrides of what Python gives, ``check`` holds what does not go together, ``changes`` compares two configs,
``document`` renders the schema as ``docs/config.md``.
"""

from tonnage.config.changes import Change, as_json, compare
from tonnage.config.check_here import check_output, check_trackers
from tonnage.config.read import config_text, overridden_key, overrides_text, read_config, write_config
from tonnage.config.schema import (
    Adapter,
    AnyLaunch,
    Batch,
    Config,
    Data,
    Launch,
    LocalLaunch,
    Objective,
    RayLaunch,
    SlurmLaunch,
    Source,
)
from tonnage.config.values import as_overrides

__all__ = [
    "Adapter",
    "AnyLaunch",
    "Batch",
    "Change",
    "Config",
    "Data",
    "Launch",
    "LocalLaunch",
    "Objective",
    "RayLaunch",
    "SlurmLaunch",
    "Source",
    "as_json",
    "as_overrides",
    "check_output",
    "check_trackers",
    "compare",
    "config_text",
    "overridden_key",
    "overrides_text",
    "read_config",
    "write_config",
]
