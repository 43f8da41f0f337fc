"""Families of small instruction tasks, generated from a seed, with inputs that are kept out of training.

An example has a *key*: what the task is about, apart from how it is asked (the word to reverse, the two numbers
to add, in either order). A key is held out if its hash says so, whatever the seed and the phrasing. So an
example to be tested on differs from everything trained on by its input, not just by its wording, and getting
it right takes the rule, not a memory. Words are held out in all families at once.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass

HELD_OUT_ONE_IN = 8

_NAMES = "Ada Ben Cleo Dan Eva Finn Gus Hana Ivo Jun Kim Leo Mia Noor Olga Pia"
_HABITS = "bakes climbs dances fishes paints reads rows runs sails sings skates swims"
_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday"
_THINGS = (
    "bag bed boat book box bridge chair coat cup door house knife lamp plate road room rope shoe soup stone street "
    "table tea wall"
)
_OPPOSITES = (
    "big small hot cold wet dry new old clean dirty full empty heavy light hard soft long short wide narrow cheap "
    "expensive thick thin high low strong weak smooth rough open closed"
)
_WORDS = (
    "acorn anchor apple arrow autumn bacon baker banana basket beach bird bottle branch bread bridge bucket "
    "butter button cabin camel candle canoe castle cedar cherry circle cloud clover coffee comet copper coral "
    "cotton cousin cradle desert dinner dragon eagle engine falcon farmer feather fern field finger flame forest "
    "fossil fox garden ginger glove grape guitar hammer harbor hazel helmet honey horse island jacket jaguar "
    "jungle kettle kitten ladder lantern lemon lentil lion lizard magnet maple marble market meadow melon mirror "
    "monkey morning mountain needle oak ocean olive onion orange orchard otter owl oyster paddle panda paper "
    "parrot pebble pencil pepper pigeon pillow pilot pirate planet plum pocket pony potato puddle puzzle rabbit "
    "raven ribbon river robin rocket saddle salmon school shadow silver sister sparrow spider spoon spring "
    "squash summer sunset tiger timber tomato tower trumpet tulip tunnel turtle valley velvet violin walnut "
    "water whale willow window winter wizard wolf yellow zebra"
)
NAMES, HABITS, DAYS = _NAMES.split(), _HABITS.split(), _DAYS.split()
THINGS, OPPOSITES, WORDS = _THINGS.split(), _OPPOSITES.split(), _WORDS.split()
ORDINALS = ("first", "second", "third", "last")


@dataclass(frozen=True)
class Example:
    family: str
    instruction: str
    answer: str
    keys: tuple[str, ...]
    """What the task is about, apart from its wording; training and held-out examples share none."""


def _word(rng: random.Random, shortest: int, longest: int) -> str:
    """A real word or, mostly, a made-up one that can be pronounced and repeats no letter."""
    if rng.random() < 0.25:
        word = rng.choice(WORDS)
        if shortest <= len(word) <= longest:
            return word
    length = rng.randint(shortest, longest)
    vowel = rng.random() < 0.3
    letters = ""
    while len(letters) < length:
        letter = rng.choice("aeiou" if vowel else "bbccddffgghjkkllmmnnppqrrrsssttvwxyz")
        letters += "" if letter in letters else letter
        vowel = rng.random() < (0.15 if vowel else 0.8)
    return letters


def _reverse(rng: random.Random) -> Example:
    word = _word(rng, 3, 6)
    ask = rng.choice(('Reverse the word "{}"', 'Write backwards: "{}"'))
    return Example("reverse", ask.format(word), word[::-1], (word,))


def _capitals(rng: random.Random) -> Example:
    word = _word(rng, 3, 6)
    ask = rng.choice(('Write in capital letters: "{}"', 'Change to capitals: "{}"'))
    return Example("capitals", ask.format(word), word.upper(), (word,))


def _letters(rng: random.Random) -> Example:
    word = _word(rng, 3, 8)
    ask = rng.choice(('How many letters are in "{}"', 'Count the letters of "{}"'))
    return Example("letters", ask.format(word), str(len(word)), (word,))


def _nth_word(rng: random.Random) -> Example:
    words = rng.sample(THINGS, 3)
    ordinal = rng.choice(ORDINALS)
    ask = rng.choice(("What is the {} word of: {}", "Give the {} word: {}"))
    answer = words[-1 if ordinal == "last" else ORDINALS.index(ordinal)]
    return Example("nth word", ask.format(ordinal, " ".join(words)), answer, (" ".join(words),))


def _next_number(rng: random.Random) -> Example:
    number = rng.randint(100, 998)
    ask = rng.choice(("What number comes after {}", "Count on from {}"))
    return Example("next number", ask.format(number), str(number + 1), (str(number),))


def _sort(rng: random.Random) -> Example:
    numbers = rng.sample(range(10), rng.randint(3, 5))
    ask = rng.choice(("Sort these numbers: {}", "Put in order: {}"))
    ordered = " ".join(map(str, sorted(numbers)))
    return Example("sort", ask.format(" ".join(map(str, numbers))), ordered, (ordered,))


def _next_day(rng: random.Random) -> Example:
    name, habit, day = rng.choice(NAMES), rng.choice(HABITS), rng.randrange(7)
    ask = rng.choice(("{} {} on {}. What day comes next?", "{} {} on {}. What is the day after?"))
    instruction = ask.format(name, habit, DAYS[day])
    return Example("next day", instruction, DAYS[(day + 1) % 7], (f"{name} {habit} {DAYS[day]}",))


def _opposite(rng: random.Random) -> Example:
    thing, at = rng.choice(THINGS), rng.randrange(len(OPPOSITES))
    given, answer = OPPOSITES[at], OPPOSITES[at ^ 1]
    ask = rng.choice(("Say the opposite: The {} is {}.", "The {} is {}. Say the opposite."))
    return Example("opposite", ask.format(thing, given), f"The {thing} is {answer}.", (f"{thing} {given}",))


FAMILIES: dict[str, tuple[Callable[[random.Random], Example], int]] = {
    "reverse": (_reverse, 3000),
    "capitals": (_capitals, 2500),
    "letters": (_letters, 1000),
    "nth word": (_nth_word, 3000),
    "next number": (_next_number, 1400),
    "sort": (_sort, 2000),
    "next day": (_next_day, 1000),
    "opposite": (_opposite, 1100),
}
"""How each family is made, and how many examples of it to train on: of the harder, more."""


def is_held_out(key: str) -> bool:
    """Whether an input is kept out of training: one in eight is, by its hash."""
    return hashlib.sha256(key.encode()).digest()[0] % HELD_OUT_ONE_IN == 0


def training_examples(seed: int) -> list[Example]:
    """15,000 examples of all families, shuffled: no held-out key, no instruction twice."""
    examples = [
        example
        for family, (_, num_examples) in FAMILIES.items()
        for example in _draw(family, num_examples, held_out=False, seed=seed)
    ]
    random.Random(seed).shuffle(examples)
    return examples


def held_out_examples(num_each: int, seed: int) -> list[Example]:
    """``num_each`` examples of every family, all their keys held out, no instruction twice."""
    return [example for family in FAMILIES for example in _draw(family, num_each, held_out=True, seed=seed)]


def _draw(family: str, num_examples: int, *, held_out: bool, seed: int) -> list[Example]:
    """Different instructions of one family, their keys either all held out or none of them."""
    rng = random.Random(f"{seed} {family} {held_out}")
    make, _ = FAMILIES[family]
    drawn: dict[str, Example] = {}
    for _ in range(200 * num_examples):
        example = make(rng)
        if all(is_held_out(key) == held_out for key in example.keys):
            drawn[example.instruction] = example
            if len(drawn) == num_examples:
                return list(drawn.values())
    raise ValueError(f"the family {family!r} has only about {len(drawn)} such examples, not {num_examples}")
