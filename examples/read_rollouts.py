"""Read the rollouts of a run: accuracy by step, what is wrong with wrong answers, the problems that never succeed.

python examples/read_rollouts.py runs/quickstart
"""

from __future__ import annotations

import sys

from algorist.store.read import query, rollouts


def main(run: str) -> None:
    """Print three views of a run's rollouts."""
    by_step = """
        SELECT step, avg(correct::INT) AS accuracy, avg(completion_tokens) AS tokens
        FROM rollouts GROUP BY step ORDER BY step"""
    for row in query(run, by_step):
        print(f"step {row['step']:>5}  accuracy {row['accuracy']:.3f}  tokens {row['tokens']:.0f}")
    for row in query(run, "SELECT reason, count(*) AS n FROM rollouts GROUP BY reason ORDER BY n DESC"):
        print(f"{row['reason']:<20} {row['n']}")
    never = """
        SELECT problem_id, any_value(gold) AS gold, count(*) AS n FROM rollouts
        GROUP BY problem_id HAVING NOT bool_or(correct) ORDER BY n DESC, problem_id LIMIT 3"""
    for problem in query(run, never):
        print(f"\nnever right in {problem['n']} completions (gold {problem['gold']}):")
        for row in rollouts(run, problem_id=problem["problem_id"], sort="-reward", limit=2):
            print(f"  reward {row['reward']:.2f}, {row['reason']}: {row['completion'][:120]!r}")


if __name__ == "__main__":
    main(sys.argv[1])
