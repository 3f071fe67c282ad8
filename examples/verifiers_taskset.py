"""A taskset of verifiers: data.train='{name: verifiers, path: examples, params: {taskset: verifiers_taskset}}' rewards=[verifiers]."""

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class Sum(vf.Task[SumData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in (trace.assistant_messages[-1].content or "").split())

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        return 1 / (1 + len(trace.assistant_messages[-1].content or ""))


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self):
        for n in range(1000):
            yield Sum(SumData(prompt=f"What is {n} + {n % 7}?", answer=str(n + n % 7)), self.config.task)


__all__ = ["Sums"]
