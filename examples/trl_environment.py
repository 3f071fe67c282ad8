"""TRL's environment class, unchanged: environment=examples/trl_environment.py:GuessNumber rewards=[environment]."""


class GuessNumber:
    """Guess a number with a tool; the reward is 1 for a hit, less for each guess before it."""

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
