"""Models that give what they read one number, a score, in place of logits: transformers' classes with one label.

    AutoModelForSequenceClassification, num_labels 1:  backbone ──► hidden state of the last token ──► score ──► number

Which class that is, and what its head is like, the family says. A configuration describes a scorer if ``architectures``
names that class, which ``make_scorer`` writes there: so whoever builds a model by a configuration builds the right one.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from tonnage.errors import user_error

HEAD = "score"
"""What the families whose head is a linear layer on the last token's hidden state call it."""
ONE_LABEL = {0: "LABEL_0"}


def is_scorer(config: PreTrainedConfig) -> bool:
    """Whether a configuration describes a model that scores, and not one of logits."""
    kind = _class_of(config)
    return kind is not None and (config.architectures or [""])[0] == kind.__name__


def auto_class(config: PreTrainedConfig) -> Any:
    """The class of transformers that builds, and loads, what a configuration describes."""
    return AutoModelForSequenceClassification if is_scorer(config) else AutoModelForCausalLM


def make_scorer(config: PreTrainedConfig) -> None:
    """Let a configuration describe the scorer of its family.

    Raises:
        UserError: the family has no such class, or the configuration is of a classifier with several labels.
    """
    kind = _class_of(config)
    if kind is None or hasattr(config, "auto_map"):
        raise user_error(
            where=f"objective.kind reward, model type {config.model_type}",
            found="a family for which transformers has no AutoModelForSequenceClassification"
            if kind is None
            else "a model with code of its own",
            needed="a model of text whose family transformers itself can give a head of scores",
            change="choose another model, of llama, qwen3 or gemma2 for instance",
        )
    if is_scorer(config) and config.num_labels != 1:
        raise user_error(
            where=f"objective.kind reward, model type {config.model_type}",
            found=f"a classifier of {config.num_labels} labels",
            needed="a model of logits, or a classifier of one label",
            change="choose the model that the classifier was made from",
        )
    if config.num_labels != 1:
        config.id2label, config.label2id = dict(ONE_LABEL), {name: number for number, name in ONE_LABEL.items()}
    config.architectures = [kind.__name__]


def check_causal(config: PreTrainedConfig, where: str) -> None:
    """Refuse a model that scores where one of logits is wanted. Raises ``UserError``."""
    if is_scorer(config):
        raise user_error(
            where=where,
            found=f"a {(config.architectures or ['classifier'])[0]}, which scores texts and writes none",
            needed="a causal language model",
            change="choose the model that it was made from; to train its scores: objective: reward",
        )


def as_causal(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of the model of logits with the same backbone: ``config`` itself if it is that."""
    if not is_scorer(config):
        return config
    config = copy.deepcopy(config)
    config.architectures = None
    return config


def head_of(model: PreTrainedModel) -> nn.Module | None:
    """The last layer of a model: of scores, or of logits.

    Raises:
        UserError: of a scorer whose head is no linear layer on hidden states.
    """
    if not is_scorer(model.config):
        logits: nn.Module | None = model.get_output_embeddings()
        return logits
    head = getattr(model, HEAD, None)
    if not isinstance(head, nn.Linear) or head.out_features != 1:
        raise user_error(
            where=f"objective.kind reward, model type {model.config.model_type}",
            found=f"{type(model).__name__}, whose head is no linear layer from the last hidden state to one number",
            needed=f"a class of transformers that ends in such a layer, {HEAD}",
            change="choose another model, of llama, qwen3 or gemma2 for instance",
        )
    return head


def _class_of(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """The class that scores, of a model of text alone."""
    found = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    return found if isinstance(found, type) else None
