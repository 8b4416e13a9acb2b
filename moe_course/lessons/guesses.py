"""A guess from before, next to what was measured. Built in: notebook 00."""

from __future__ import annotations


def report(guess: object, answer: object) -> None:
    """Print how a guess compares with the answer. `None` means: not guessed yet.

    Numbers are compared as numbers and told how far they are off; everything else has to be equal.
    """
    if guess is None:
        print(f"no guess yet; measured: {answer}. Set your guess above, run that cell and this one again.")
    elif guess == answer:
        print(f"your guess {guess} is right")
    elif _number(guess) and _number(answer):
        far = f"{abs(guess - answer):g} too {'many' if guess > answer else 'few'}"
        print(f"your guess {guess} is {far}; measured: {answer}. What had you not thought of?")
    else:
        print(f"your guess {guess} is not it; measured: {answer}. What had you not thought of?")


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
