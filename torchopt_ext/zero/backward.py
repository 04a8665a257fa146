"""Backward passes of the optimizers that reduce gradients in one process group."""

import weakref
from typing import Any, ClassVar

from torchopt_ext._torch import call_at_end_of_backward, current_node, graph_task


class BackwardPasses:
    """Detects where backward passes begin and end, and orders the reducers of a process group.

    A pass ends with the outermost backward call. Reentrant activation checkpointing runs a graph
    task inside a node of another task. The inner task's callbacks see this node as the current node
    (NodeGuard in torch/csrc/autograd/engine.cpp). The outermost task's final callbacks see none.

    All ranks start a group's collectives in the same order: that in which reducers were built.
    Ranks may use different parameters and complete the buckets of several reducers in different
    orders, so reducers wait for the end of the pass. Only the first of them may start earlier, once
    all ranks know it as the first: they may drop an earlier reducer at different times.
    """

    _of: ClassVar[weakref.WeakKeyDictionary[Any, "BackwardPasses"]] = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        self._count = 0
        self._reducers: weakref.WeakSet[Any] = weakref.WeakSet()  # all of the group
        self._members: weakref.WeakSet[Any] = weakref.WeakSet()  # those in the current pass
        self._task: int | None = None  # the graph task of the last gradient
        # Final callbacks by graph task. Only the task keeps a callback alive: an error drops it.
        self._callbacks: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    @classmethod
    def of(cls, group: Any) -> "BackwardPasses":
        return cls._of.setdefault(group, cls())

    def add(self, reducer: Any) -> None:
        """Gives a reducer the next number."""
        reducer.number = self._count
        reducer.early = self._count == 0
        self._count += 1
        self._reducers.add(reducer)

    def is_first(self, reducer: Any) -> bool:
        """Returns whether this rank holds no earlier reducer."""
        return reducer.number == min(other.number for other in self._reducers)

    def enter(self, reducer: Any) -> bool:
        """Records a gradient. Returns whether it is the reducer's first in this pass."""
        task = graph_task()
        if task != self._task:
            if not self._callbacks:  # an error has ended the previous pass
                self.end()
            self._task = task
            self._call_at_end_of(task)
        if reducer in self._members:
            return False
        self._members.add(reducer)
        return True

    def _call_at_end_of(self, task: int) -> None:
        if task < 0 or task in self._callbacks:
            return
        here = weakref.ref(self)

        def ended() -> None:
            passes, node = here(), current_node()
            if passes is None:
                return
            if node is None:
                passes.end()
                return

            def left(*_: Any) -> None:
                passes = here()
                if passes is not None:
                    passes._callbacks.pop(-1, None)
                    passes._call_at_end_of(graph_task())

            node.register_hook(left)
            passes._callbacks[-1] = left

        self._callbacks[task] = ended
        call_at_end_of_backward(ended)

    def end(self) -> None:
        """Ends the pass. Every reducer starts its remaining reductions."""
        members = sorted(self._members, key=lambda member: member.number)
        self._members.clear()
        self._task = None
        for reducer in members:
            reducer.reduce_rest()
