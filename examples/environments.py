"""Environments: two that answer a completion which has ended, environment=examples/environments.py:HigherLower; and TRL's class."""

import re


class HigherLower:
    """Guess a number: says "too high" or "too low" until it is right, twice at most."""

    def start(self, problem):  # once for each completion
        self.number, self.tries = int(problem.answer), 0

    def reply(self, rollout):  # rollout.text: written since the last reply; rollout.turns: all before
        self.tries += 1
        guess = re.search(r"<answer>\s*(-?\d+)", rollout.text)
        if guess is None or int(guess[1]) == self.number or self.tries == 3:
            return None  # the completion ends
        return "too high" if int(guess[1]) > self.number else "too low"


class CorrectYourSum:
    """Names the first wrong sum of a completion, once; the model answers again."""

    def start(self, problem):
        self.named = False

    def reply(self, rollout):
        for left, sign, right, result in re.findall(r"(\d+) ?([-+*]) ?(\d+) ?= ?(-?\d+)", rollout.text):
            numbers = int(left), int(right)
            value = {
                "+": numbers[0] + numbers[1],
                "-": numbers[0] - numbers[1],
                "*": numbers[0] * numbers[1],
            }[sign]
            if value != int(result) and not self.named:
                self.named = True
                return f"{left} {sign} {right} is not {result}. Correct it and answer again."
        return None


class GuessNumber:
    """TRL's form: a number is guessed with a tool, and each guess costs; with rewards=[environment]."""

    def reset(self, answer, **row):  # the columns of the row, by name
        self.number, self.guesses, self.hit = int(answer), 0, False
        return "\nGuess the number with the tool `guess`; it is between 1 and 100."

    def guess(self, number: int) -> str:
        """
        Guess the number.

        Args:
            number: A number between 1 and 100.

        Returns:
            Whether the guess was too low, too high or right.
        """
        self.guesses += 1
        self.hit = self.hit or number == self.number
        return "right" if number == self.number else "too low" if number < self.number else "too high"

    def get_reward(self) -> float:
        return max(0.1, 1.2 - 0.2 * self.guesses) if self.hit else 0.0
