"""What is minimised: whether a run learns from preferences, by which loss, and against which reference.

Whether it does, a word says (``methods``): TRL's command or the name of its script, Axolotl's ``rl`` and
``reward_model``, LLaMA-Factory's ``stage``. Of pairs of answers, which loss it is follows from that word and from the
losses that are named beside it (``tables/meanings.yaml``, ``pair_loss``); KTO and reward models have one each.
"""

from __future__ import annotations

from typing import Any

from tonnage.migration import methods
from tonnage.migration.draft import Draft, Pick
from tonnage.migration.keys import NOT_SAID, asks_for_nothing
from tonnage.migration.llama_factory import holds_pairs
from tonnage.migration.meanings import meaning_of
from tonnage.migration.programs import AXOLOTL_YAML, LLAMA_FACTORY_1, LLAMA_FACTORY_YAML, SWIFT_COMMAND, TRL
from tonnage.migration.values import flag, number, numbers, text, whole, words

SUPPOSED = "Taken for supervised training, as its name says. What else the script does is not known here."
SUPERVISED = ("", "sft")
TOLD_BY_FILES = (AXOLOTL_YAML, LLAMA_FACTORY_YAML, LLAMA_FACTORY_1, SWIFT_COMMAND)
"""Programs whose files say what is trained."""
LOSSES = {"dpo": "sigmoid", "cpo": "sigmoid"}
"""By the word for a way to learn from pairs: its loss where none is named, if that has another name."""
OF_PAIRS = ("loss_weights", "objective.label_smoothing", "objective.margin", "cpo_alpha", "per_token")
"""Quantities that mean something where pairs of answers are learned from, and nowhere else."""
OF_TOKENS = ("dft", "eaft", "eaft_tokens", "objective.power")
"""Quantities that mean something where answers are learned as they are, and nowhere else."""
LIKELIEST, LARGEST_ENTROPY = 20, 3.0
"""Tokens whose entropy weighs a token, and what it is divided by here, but not in Axolotl."""
OF_KTO = ("objective.desirable", "objective.undesirable")
OF_PREFERENCES = (
    *(*OF_PAIRS, *OF_KTO, "objective.center", "objective.beta", "objective.supervised"),
    *("reference_model", "longest_prompt", "dropout_off", "of_pairs"),
)
"""Quantities that mean something where preferences are learned from, and nowhere else."""
NO_COMMAND = (
    "Belongs to preferences, and no key says how they are learned from: give the command as well, as in "
    '`tonnage import "trl dpo --config FILE"` (or orpo, cpo, kto, reward).'
)


def objective(draft: Draft) -> None:
    """Supervised rows, or preferences and their loss; a script or a method of anything else is refused."""
    method = _method(draft)
    if method is None:
        _without_preferences(draft)
        _weighing_tokens(draft)
        return
    draft.drop_every("Belongs to supervised training.", *OF_TOKENS)
    draft.method = next(words[method.value] for words in methods.WORDS.values() if method.value in words)
    if draft.method == "pairs":
        _pairs(draft, method)
    elif draft.method == "kto":
        _kto(draft, method)
    else:
        _reward(draft, method)
    _rest(draft)


def _pairs(draft: Draft, method: Pick[str]) -> None:
    """A loss of a chosen and a rejected answer."""
    draft.drop_every("Belongs to another objective.", *OF_KTO, "objective.center")
    _loss(draft, method)
    kind = str(draft.tree.get("objective.kind", ""))
    draft.copy("objective.beta", number)
    draft.imply_default("objective.beta")
    _smoothing(draft, kind)
    _margin(draft, kind)
    _chosen_s_own(draft, kind)
    per_token = draft.first("per_token", flag)
    if per_token is not None and kind in ("dpo", "hinge"):
        draft.put("objective.per_token", per_token.value, per_token)
    draft.drop(per_token, "This loss is of a token's log-probability anyway.")
    _reference(draft, kind)
    _differences(draft, kind)


def _kto(draft: Draft, method: Pick[str]) -> None:
    """The loss of answers that are each desirable or not."""
    draft.drop_every("Belongs to another objective.", *OF_PAIRS, "objective.center")
    losses = draft.first("loss", _names)
    meaning = meaning_of("kto_loss", " ".join(losses.value) if losses is not None and draft.program is TRL else "kto")
    if meaning.outcome == "refused":
        assert losses is not None
        draft.refuse(losses, meaning.value.format(word=" ".join(losses.value)))
        draft.drop(method, "Which loss it is, another key says.")
        draft.leave_open("objective.kind", "the loss of answers with a label that is there: kto", example="kto")
    else:
        draft.put("objective.kind", "kto", method, losses if draft.program is TRL else None)
    draft.drop(losses, "Of pairs: KTO has a loss of its own.")
    draft.copy("objective.beta", number)
    draft.imply_default("objective.beta")
    for quantity in OF_KTO:
        draft.copy(quantity, number)
    draft.only("objective.supervised", number, 0, "Off.", "KTO has no loss of the desirable answers beside it.")
    _reference(draft, "kto")
    draft.note("KTO's divergence", program=draft.program.name)
    if draft.program is TRL:
        draft.note("pairs as labels")
        draft.note("texts of preferences")


def _reward(draft: Draft, method: Pick[str]) -> None:
    """A model of scores, and the loss of the scores of pairs."""
    draft.put("objective.kind", "reward", method)
    if draft.program is TRL:
        draft.refuse(draft.first("loss", _names), "A reward model has one loss, that of Bradley and Terry.")
        draft.note("texts of preferences")
    else:
        draft.note("margins of rows", program=draft.program.name)
    if draft.program is LLAMA_FACTORY_YAML:
        draft.note("value head")
    draft.copy("objective.center", number)
    others = ("loss", *OF_PAIRS, *OF_KTO, "objective.beta", "objective.supervised", "reference_model")
    draft.drop_every("Belongs to another objective: scores have no reference and one loss.", *others)


def _method(draft: Draft) -> Pick[str] | None:
    """The way to learn from preferences that is asked for."""
    named = (_named(draft, quantity) for quantity in ("trl", "rl", "stage", "swift"))
    picks = [*_scripts(draft), *named, _scores(draft)]
    if draft.program is LLAMA_FACTORY_1 and holds_pairs(draft):
        draft.note("pairs of version 1")
        picks.append(Pick("dpo", ()))
    asked_for = [pick for pick in picks if pick is not None]
    for pick in asked_for[1:]:
        draft.drop(pick if pick.value == asked_for[0].value else None, "Another key says it before.")
        draft.refuse(pick, f"{asked_for[0].shown} says otherwise: a run has one objective.")
    return asked_for[0] if asked_for else None


def _scores(draft: Draft) -> Pick[str] | None:
    """Axolotl's ``reward_model``, and the number of labels of such a model."""
    pick = draft.first("reward_model", flag)
    is_on = pick is not None and pick.value
    draft.drop(None if is_on else pick, "Off.")
    otherwise = "Next tokens are predicted, or one score (reward_model): not labels."
    draft.only("num_labels", whole, int(is_on), "A score is one number.", otherwise)
    return Pick("reward", pick.settings) if pick is not None and is_on else None


def _named(draft: Draft, quantity: str) -> Pick[str] | None:
    pick = draft.first(quantity, lambda value: "" if asks_for_nothing(value) else text(value).lower())
    if pick is None or pick.value in methods.WORDS[quantity]:
        return pick
    if pick.value in SUPERVISED or (quantity == "stage" and pick.value == "pt"):
        if quantity != "stage":  # which also says what rows are
            draft.drop(pick, "Supervised fine-tuning.")
        return None
    draft.refuse(pick, methods.refusal(pick.value))
    return None


def _scripts(draft: Draft) -> list[Pick[str]]:
    """The word for preferences in a script's name; scripts of something else are refused, and so is one of which nobody
    knows what it trains."""
    picks = []
    for setting in draft.settings("script"):
        pick = Pick(str(setting.value), (setting,))
        word, trained = methods.method_of(pick.value)
        if draft.program in TOLD_BY_FILES:
            draft.drop(pick, "What is trained, its configuration says.")
        elif trained in methods.PREFERENCES:
            picks.append(Pick(word, (setting,)))
        elif trained == "supervised":
            draft.drop(pick, SUPPOSED)
        elif word:
            draft.refuse(pick, methods.refusal(word))
        else:
            draft.refuse(
                pick,
                "Nobody here knows what it trains, and its name does not say (sft, train, finetune; dpo, orpo, cpo, "
                "kto; reward). If these are arguments of supervised training, --partial writes the config.",
            )
    return picks


def _without_preferences(draft: Draft) -> None:
    """Keys of preferences where nothing asks for any: Axolotl and LLaMA-Factory read none of them then, while
    arguments may be those of a script that does."""
    is_read = draft.program not in TOLD_BY_FILES
    losses = draft.first("loss", _names)
    if losses is not None and is_read:
        meaning = meaning_of("loss", " ".join(losses.value))
        if meaning.outcome == "objective.kind":
            draft.put("objective.kind", meaning.value, losses)
        draft.drop(losses if meaning.outcome == "needless" else None, meaning.value)
        draft.refuse(losses, meaning.value.format(no_command=NO_COMMAND))
    for quantity in ("loss", *OF_PREFERENCES):
        for pick in draft.every(quantity, lambda value: value):
            is_idle = asks_for_nothing(pick.value) or not is_read
            draft.drop(pick if is_idle else None, "Belongs to preferences, for which nothing asks.")
            draft.refuse(pick, NO_COMMAND)


def _weighing_tokens(draft: Draft) -> None:
    """Losses of supervised rows in which tokens count by what the model makes of them."""
    for kind in ("dft", "eaft"):
        draft.switch(kind, "objective.kind", kind, "Off.")
    if draft.tree.get("objective.kind") == "eaft":
        power = draft.copy("objective.power", number)
        draft.only("eaft_tokens", whole, LIKELIEST, "So many are looked at.")
        if draft.program is AXOLOTL_YAML:
            draft.note("Axolotl's entropies", factor=LARGEST_ENTROPY ** (1.0 if power is None else power.value))
    draft.drop_every("Belongs to eaft.", "objective.power", "eaft_tokens")
    if "objective.kind" in draft.tree:
        draft.note("tokens that are weighed")


def _names(value: Any) -> list[str]:
    return [name.lower() for name in words(value)]


def _loss(draft: Draft, method: Pick[str]) -> None:
    """The kind of objective, and with losses that are weighed against each other the weight of the chosen's own."""
    losses, weights = draft.first("loss", _names), draft.first("loss_weights", numbers)
    names = losses.value if losses is not None else [LOSSES.get(method.value, method.value)]
    if weights is not None and len(weights.value) != len(names):
        draft.refuse(weights, f"One number for each loss ({', '.join(names)}).")
        weights = None
    shares = weights.value if weights is not None else [1.0] * len(names)
    pairwise = [(name, share) for name, share in zip(names, shares, strict=True) if name != "sft"]
    if len(pairwise) != 1 or pairwise[0][1] <= 0:
        draft.refuse((losses, weights), "One loss of pairs, and beside it sft (objective.supervised).")
        draft.drop(method, "Which loss it is, other keys say.")
        _leave_kind_open(draft)
        return
    ((name, share),) = pairwise
    family = "factory" if draft.program in (LLAMA_FACTORY_YAML, LLAMA_FACTORY_1) else method.value
    meaning = meaning_of("pair_loss", f"{family}/{name}")
    if meaning.outcome == "refused":
        draft.refuse(losses if losses is not None else method, meaning.value.format(word=name))
        draft.drop(method, "Which loss it is, other keys say.")
        _leave_kind_open(draft)
    else:
        draft.put("objective.kind", meaning.value, method, losses)
    if name == "sigmoid_norm" and losses is not None:
        draft.put("objective.per_token", True, losses)
    if "sft" in names:
        supervised = sum(part for other, part in zip(names, shares, strict=True) if other == "sft") / share
        draft.put("objective.supervised", supervised, losses, weights)
    if share != 1:
        draft.note("weighed loss", share=f"{share:g}")
    draft.drop(weights, "Of one loss the weight changes no step of AdamW.")


def _leave_kind_open(draft: Draft) -> None:
    draft.leave_open("objective.kind", "a loss of pairs that is there: dpo, ipo, hinge, orpo, simpo", example="dpo")


def _smoothing(draft: Draft, kind: str) -> None:
    pick = draft.first("objective.label_smoothing", number)
    if pick is None or pick.value == 0:
        draft.drop(pick, "Off.")
    elif kind == "dpo":
        draft.put("objective.label_smoothing", pick.value, pick)
        if draft.program in (TRL, AXOLOTL_YAML):
            draft.note("smoothed labels")
    elif kind in ("ipo", "hinge"):
        draft.drop(pick, "This loss ignores it there too.")
    else:
        draft.refuse(pick, "Of dpo alone labels are smoothed.")


def _margin(draft: Draft, kind: str) -> None:
    pick = draft.first("objective.margin", number)
    if kind != "simpo":
        draft.drop(pick, "Belongs to SimPO.")
    elif pick is not None:
        draft.put("objective.margin", pick.value, pick)
    elif draft.default("objective.margin") is not None:
        draft.imply_default("objective.margin")
    else:
        draft.leave_open("objective.margin", "SimPO's gamma, which Axolotl has no default for", example="0.5")


def _chosen_s_own(draft: Draft, kind: str) -> None:
    """The weight of the loss of the chosen answers by themselves."""
    alpha = draft.first("cpo_alpha", number)
    if kind != "simpo":
        draft.drop(alpha, "Belongs to CPO and SimPO.")
    elif alpha is not None:
        draft.put("objective.supervised", alpha.value, alpha)
    else:
        draft.imply_default("objective.supervised")
    pick = draft.first("objective.supervised", number)
    if pick is None or pick.value == 0:
        draft.drop(pick, "Off.")
    elif kind == "orpo":
        draft.refuse(pick, "ORPO has the loss of the chosen answers with weight 1: write objective.beta for another.")
    elif "objective.supervised" in draft.tree and kind != "simpo":
        draft.refuse(pick, "The sft among the losses says it.")
    else:
        draft.put("objective.supervised", pick.value, pick)


def _reference(draft: Draft, kind: str) -> None:
    """Which model answers are compared with: the one that is trained, as it was, or another one."""
    reference, model = draft.first("reference_model", text), draft.first("model", text)
    if kind in ("orpo", "simpo"):
        draft.drop(reference, "This loss has no reference.")
    elif reference is not None and model is not None and reference.value == model.value:
        draft.drop(reference, "The reference is the model as it was at the start.")
    elif reference is not None:
        draft.put("objective.reference", reference.value, reference)


def _rest(draft: Draft) -> None:
    """Keys of which one value is so here, and keys that the same loss needs nowhere."""
    draft.drop_every("adapter.dropout says what is dropped.", "dropout_off")
    for pick in draft.every("of_pairs", lambda value: value):
        if pick.value in NOT_SAID:
            draft.drop(pick, "Not set.")
        name = pick.settings[0].name.partition(".")[0]
        meaning = meaning_of("of_pairs", f"{name}={str(pick.value).strip().lower().replace(' ', '')}")
        draft.drop(pick if meaning.outcome == "needless" else None, meaning.value)
        draft.refuse(pick, meaning.value)


def _differences(draft: Draft, kind: str) -> None:
    """What the other program does otherwise with the same loss."""
    if draft.program is LLAMA_FACTORY_YAML:
        return
    if draft.program is TRL:
        draft.note("texts of preferences")
    if kind == "orpo":
        draft.note("ORPO's prompt")
    elif draft.tree.get("objective.supervised"):
        draft.note("mean of a micro-batch")
    if kind in ("orpo", "simpo") and draft.program is TRL:
        draft.imply("router_loss", "auto", "ORPO and CPO add it where the model's config.json asks for it")
