"""The task: a shop assistant answers customers, and a rule says which of two answers is better.

    Customer: Not a blue lamp, but a red chair, please. Assistant:  Certainly! Here is a red chair.     1.5
                                                                    We have a blue lamp. Hurry up.     -0.5

A good answer names the thing that was asked for and no other one, is polite once, and is short. :func:`true_score` is
the rule. Only pairs that it has ordered are trained on; the numbers are the judge's alone.

The demonstrations are by assistants of every kind, in the sentences below; a model that copies them well scores as they
do. One colour and thing in seven is held out by a hash, so that the split is the same on every machine.
"""

from __future__ import annotations

import functools
import hashlib
import random
import re

COLOURS = ("red", "green", "blue", "white", "black", "yellow", "brown", "grey", "pink", "golden")
THINGS = (
    "chair", "lamp", "hat", "coat", "scarf", "table", "mirror", "teapot", "kettle", "basket", "blanket", "clock",
    "cup", "jug", "carpet", "vase", "candle", "cushion", "bowl", "umbrella",
)  # fmt: skip
REQUESTS = (  # {0}: what is asked for; {1}: another thing
    "Do you have {0}?",
    "I am looking for {0}.",
    "Where can I find {0}?",
    "Not {1}, but {0}, please.",
    "My mother has {1}. Now she needs {0}.",
    "I have {1} and need {0}.",
)
OFFERS = ("Here is {0}.", "We have {0} for you.", "There is {0} by the window.")
NO_OFFER = ("We have many things.", "I will look.")
COURTESIES = (
    "Certainly!", "With pleasure.", "Thank you for asking.", "Have a lovely day.", "Please come again.",
    "You are welcome.",
)  # fmt: skip
RUDENESS = ("Hurry up.", "Go away.", "Do not touch it.", "What nonsense!")
CHATTER = (
    "The weather is fine today.",
    "My feet hurt.",
    "We close at five.",
    "My uncle likes fish.",
    "It is late.",
)
# A word of each sentence that no other sentence has: it counts wherever it stands.
COURTEOUS_WORDS = {"Certainly", "pleasure", "Thank", "lovely", "Please", "welcome"}
RUDE_WORDS = {"Hurry", "away", "touch", "nonsense"}
FREE_COURTESIES, FREE_WORDS = 2, 12

Item = tuple[str, str]  # colour, thing


def is_held_out(item: Item) -> bool:
    """Whether requests for it are for judging only."""
    return hashlib.sha256(" ".join(item).encode()).digest()[0] % 7 == 0


@functools.cache
def items(held_out: bool) -> tuple[Item, ...]:
    """The things to ask for, of training or held out."""
    return tuple(
        (colour, thing)
        for colour in COLOURS
        for thing in THINGS
        if is_held_out((colour, thing)) == held_out
    )


def prompts(held_out: bool, count: int, seed: int) -> list[dict[str, str]]:
    """Requests, ``{"input", "label"}``; the label is what is asked for, like ``"red chair"``."""
    rng = random.Random(f"prompts {held_out} {seed}")
    asked, rows = items(held_out), []
    for _ in range(count):
        item = rng.choice(asked)
        text = rng.choice(REQUESTS).format(
            f"a {' '.join(item)}", f"a {' '.join(another(item, rng))}"
        )
        rows.append({"input": f"Customer: {text} Assistant:", "label": " ".join(item)})
    return rows


def another(item: Item, rng: random.Random) -> Item:
    """A thing to train on that differs in colour and kind."""
    return rng.choice(_others(item))


@functools.cache
def _others(item: Item) -> list[Item]:
    return [other for other in items(False) if other[0] != item[0] and other[1] != item[1]]


def demonstration(prompt: str, label: str, rng: random.Random) -> str:
    """An answer by one of the assistants; half of them name the right thing."""
    right = (*label.split(),)
    named = [w for w in re.findall(r"\w+ (?:" + "|".join(THINGS) + r")\b", prompt) if w != label]
    wrong = (*rng.choice(named).split(),) if named and rng.random() < 0.5 else another(right, rng)
    mixed = rng.choice([(wrong[0], right[1]), (right[0], wrong[1])])
    item = rng.choices([right, wrong, mixed, None], [0.5, 0.2, 0.15, 0.15])[0]
    offer = (
        rng.choice(NO_OFFER) if item is None else rng.choice(OFFERS).format(f"a {' '.join(item)}")
    )
    before = rng.choices(["", rng.choice(COURTESIES), rng.choice(RUDENESS)], [0.55, 0.3, 0.15])[0]
    talk = " ".join(rng.sample(CHATTER, k=rng.choices([0, 1, 2], [0.6, 0.25, 0.15])[0]))
    polite = " ".join(rng.sample(COURTESIES, k=rng.choices([1, 2], [0.85, 0.15])[0]))
    after = rng.choices(["", polite, rng.choice(RUDENESS)], [0.55, 0.3, 0.15])[0]
    return " " + " ".join(filter(None, (before, offer, talk, after)))


def demonstrations(count: int, seed: int) -> list[dict[str, str]]:
    """What supervised training sees, ``{"input", "output"}``."""
    rng = random.Random(f"demonstrations {seed}")
    return [
        {"input": row["input"], "output": demonstration(row["input"], row["label"], rng)}
        for row in prompts(held_out=False, count=count, seed=seed)
    ]


def names_only(label: str, answer: str) -> bool:
    """Whether an answer names the thing that was asked for, and no other one."""
    words = re.findall(r"\w+", answer)
    return {" ".join(pair) for pair in zip(["", *words], words) if pair[1] in THINGS} == {label}


def true_score(label: str, answer: str) -> float:
    """The rule, from below 0 to 1.5.

    1 for naming the thing that was asked for, and no other; 0.5 for a courtesy, less 0.25 for each after the second;
    less 0.5 where a word is rude; less 0.05 for each word after the twelfth.
    """
    words = re.findall(r"\w+", answer)
    courtesies = sum(word in COURTEOUS_WORDS for word in words)
    return (
        float(names_only(label, answer))
        + 0.5 * (courtesies > 0)
        - 0.25 * max(0, courtesies - FREE_COURTESIES)
        - 0.5 * any(word in RUDE_WORDS for word in words)
        - 0.05 * max(0, len(words) - FREE_WORDS)
    )


def vocabulary() -> list[str]:
    """Every word and mark of the task, in order."""
    sentences = (
        *REQUESTS,
        *OFFERS,
        *NO_OFFER,
        *COURTESIES,
        *RUDENESS,
        *CHATTER,
        "Customer: a Assistant:",
    )
    text = " ".join((*sentences, *COLOURS, *THINGS)).replace("{0}", "").replace("{1}", "")
    return sorted(set(re.findall(r"\w+|[^\w\s]", text)))
