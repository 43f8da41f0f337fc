"""The model: its files, its construction on the meta device, its anatomy, its weights, attention for packs."""

import logging

# transformers imports torchao where it is installed, which says what a machine without its GPU lacks
logging.getLogger("torchao").addFilter(lambda record: "Failed to load" not in str(record.msg))
logging.getLogger("torch.utils._pytree").addFilter(lambda record: "is an Enum subclass" not in str(record.msg))
