"""Word problems of one addition or subtraction, the chat that asks them, and the check of an answer."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

NAMES = ("Tom", "Mia", "Leo", "Ann", "Sam", "Eva", "Max", "Lily", "Ben", "Zoe")
THINGS = ("apples", "books", "coins", "cards", "shells", "pens", "stickers", "eggs")
GAINS, LOSSES = ("finds", "buys", "gets"), ("loses", "sells", "gives away")


@dataclass(frozen=True)
class Problem:
    name: str
    thing: str
    verb: str
    before: int
    change: int

    @property
    def gains(self) -> bool:
        return self.verb in GAINS

    @property
    def question(self) -> str:
        more = " more" if self.gains else ""
        return (
            f"{self.name} has {self.before} {self.thing} and {self.verb} {self.change}{more}. "
            f"How many {self.thing} does {self.name} have now?"
        )

    @property
    def answer(self) -> int:
        return self.before + self.change if self.gains else self.before - self.change

    @property
    def solution(self) -> str:
        what, sign = (f"more {self.thing}", "+") if self.gains else (self.thing, "-")
        return (
            f"{self.name} {self.verb} {self.change} {what}. {self.before} {sign} {self.change} = {self.answer}, "
            f"the answer is {self.answer}."
        )

    @property
    def chat(self) -> list[dict[str, str]]:
        """The messages that ask the question, after a solved example."""
        return [
            {"role": "system", "content": "Answer in one sentence."},
            {"role": "user", "content": EXAMPLE.question},
            {"role": "assistant", "content": EXAMPLE.solution},
            {"role": "user", "content": self.question},
        ]


EXAMPLE = Problem("Kim", "pears", "buys", 4, 5)


def draw(random_: random.Random) -> Problem:
    name, thing = random_.choice(NAMES), random_.choice(THINGS)
    if random_.random() < 0.5:
        return Problem(name, thing, random_.choice(GAINS), random_.randint(2, 9), random_.randint(1, 5))
    return Problem(name, thing, random_.choice(LOSSES), random_.randint(5, 9), random_.randint(1, 4))


def is_right(text: str, answer: int) -> bool:
    """Whether the last number that the text calls the answer is the right one."""
    found = re.findall(r"answer is (\d+)", text)
    return bool(found) and int(found[-1]) == answer
