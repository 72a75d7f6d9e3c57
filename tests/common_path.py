"""How many machine instructions a warp executes for full, aligned blocks in the window of seven.

A basic block of the machine code is rare where most of its instructions come from lines that are not common
(line_coverage.py). Counted is every basic block that a warp can come through from the entry to an EXIT without passing
a rare one: of a choice whose two sides are both common, both sides, since lanes may part there. So it errs on the high
side; what it can miss are common instructions within rare basic blocks, and the rounds of a loop that waits.
"""

from __future__ import annotations

import heapq
import math
import re
from dataclasses import dataclass, field

from line_coverage import BLOCKS_PER_WARP, ESCAPES, RANKS, WARPS, Coverage, coverage, source_lines
from machine_code import Kernel

# Loops that may lie on the path, by a piece of a source line of theirs, and the rounds they take. Others are an error.
ROUNDS = {
    "+= WARPS": "shared",  # the jobs, by all warps together
    "BLOCKS_PER_WARP": "blocks",
    "n_jobs": "jobs",
    "&= bits - 1": "escapes",
    "&= escaped - 1": "escapes",
    "look_back(": "once",  # the thread block before has its prefix, or has it soon
}

# ---- control flow ----

END = -1
NEVER = 1 << 30
SLACK = 4  # instructions in rare basic blocks that one may pass: what the compiler has moved to where common paths meet


@dataclass
class Graph:
    """Basic blocks by the index of their first instruction."""

    kernel: Kernel
    blocks: dict[int, range] = field(default_factory=dict)
    successors: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        code = self.kernel.code
        self._meeting: dict[str, set[int]] = {}  # by barrier register
        for instruction in code:
            if instruction.opcode.startswith("BSSY"):
                register, label = instruction.operands.split(",")
                self._meeting.setdefault(register.strip(), set()).add(self.kernel.labels[label.strip(" `()")])
        following = [self._following(index) for index in range(len(code))]
        leaders = {0, *(index for index in self.kernel.labels.values() if index < len(code))}
        for index, after in enumerate(following):
            if after != [index + 1]:
                leaders |= {index + 1, *after} - {END}
        order = sorted(leader for leader in leaders if leader < len(code))
        for first, behind in zip(order, [*order[1:], len(code)], strict=True):
            self.blocks[first] = range(first, behind)
            self.successors[first] = following[behind - 1]

    def _following(self, index: int) -> list[int]:
        """Where execution goes on behind an instruction, as far as converged warps go."""
        labels = self.kernel.labels
        instruction = self.kernel.code[index]
        name = instruction.opcode.split(".")[0]
        targets = [labels[label] for label in re.findall(r"\.L_\w+", instruction.operands) if label in labels]
        conditional = instruction.predicate or re.search(r"(?<!\w)!?U?P\d", instruction.operands)
        if name == "EXIT":
            return [index + 1, END] if instruction.predicate else [END]
        if name in ("RET", "KILL", "BPT"):
            return [END]
        if name == "BRX":
            return targets
        if name == "BRA" and ".DIV" in instruction.opcode:  # taken by a warp whose lanes have come apart
            return [index + 1]
        if name == "BRA" and (".CONV" in instruction.opcode or not conditional):
            return targets
        if name == "BRA":
            return [index + 1, *targets]
        if name == "CALL" and targets:  # a jump: functions have other labels
            return [index + 1, *targets] if conditional else targets
        if name == "BSYNC":
            return self._reconvergence(index)
        if name in ("JMP", "JMX", "BRXU", "JMXU"):
            raise NotImplementedError(f"{instruction.opcode} in {self.kernel.name}")
        return [index + 1] if index + 1 < len(self.kernel.code) else [END]

    def _reconvergence(self, index: int) -> list[int]:
        """Behind BSYNC: the target of the BSSY with the same barrier register, nearly always the next instruction."""
        targets = self._meeting[self.kernel.code[index].operands.split(",")[0].strip()]
        return [index + 1] if index + 1 in targets else sorted(targets)

    def back_edges(self) -> list[tuple[int, int]]:
        """(last block, first block) of each loop that can be reached; a loop has one for each way back to its start."""
        found: list[tuple[int, int]] = []
        done: set[int] = set()
        open_, stack = {0}, [(0, 0)]  # on the way from the entry; with the place of the successor that is next
        while stack:
            block, place = stack.pop()
            after = self.successors[block]
            if place == len(after):
                open_.discard(block)
                done.add(block)
                continue
            stack.append((block, place + 1))
            target = after[place]
            if target in open_:
                found.append((block, target))
            elif target != END and target not in done:
                open_.add(target)
                stack.append((target, 0))
        return found

    def indices(self, blocks: set[int]) -> list[int]:
        """The places of the instructions of some blocks."""
        return [index for block in sorted(blocks) for index in self.blocks[block]]

    def loop(self, last: int, first: int, before: dict[int, list[int]]) -> set[int]:
        """The blocks of a natural loop; `before` has the predecessors of each block."""
        inside, todo = {first}, [last]
        while todo:
            block = todo.pop()
            if block not in inside:
                inside.add(block)
                todo += before[block]
        return inside


@dataclass
class Loop:
    """A loop on the path: the places of its instructions in the code, and the kind of its rounds."""

    indices: list[int]
    rounds: str


@dataclass
class CommonPath:
    """Places in the kernel's code, those in loops once, and the loops."""

    kernel: Kernel
    indices: list[int]
    loops: list[Loop]

    def count(self, opcodes: str = "", jobs: int = 1, blocks: int = 1) -> float:
        """Instructions whose opcode matches, with so many rounds of the loops over jobs and over a warp's blocks."""
        matching = {index for index in self.indices if re.match(opcodes, self.kernel.code[index].opcode)}
        times = {"jobs": jobs, "shared": jobs / WARPS, "blocks": blocks, "once": 1, "escapes": rounds_of_escapes()}
        rounds: dict[int, float] = dict.fromkeys(matching, 1.0)
        for loop in self.loops:
            for index in matching.intersection(loop.indices):  # loops may lie in loops
                rounds[index] *= times[loop.rounds]
        return sum(rounds.values())


def rounds_of_escapes() -> float:
    """How many escapes the lane with the most of them has on the average, of 32 lanes with 32 values each."""
    below, expected = 0.0, 0.0
    for n in range(32):
        below += math.comb(32, n) * ESCAPES**n * (1 - ESCAPES) ** (32 - n)
        expected += 1 - below**32
    return expected


def a_value(kernel: Kernel, variant: str, case: str = "chosen", opcodes: str = "", ranks: int = RANKS) -> float:
    """Machine instructions a value (of the output, where several ranks are added up).

    Those of a lane, by its values, on the average over the warps of a thread block. With `opcodes`, a regular
    expression, only those that match.
    """
    covered = coverage(variant, kernel.architecture, case)
    blocks = 1 if kernel.name.endswith("decode_reduce") else BLOCKS_PER_WARP[variant]
    first, other = (common_path(kernel, covered, warp).count(opcodes, ranks, blocks) for warp in (True, False))
    return (first + (WARPS - 1) * other) / WARPS / (32 * blocks)


def common_path(kernel: Kernel, covered: Coverage, first_warp: bool = True) -> CommonPath:
    """Of the first warp of a thread block, which also looks back for the others, or of any other."""
    graph = Graph(kernel)
    cost = {b: len(graph.blocks[b]) if _is_rare(graph, b, covered, first_warp) else 0 for b in graph.blocks}
    cost[END] = 0
    before: dict[int, list[int]] = {block: [] for block in cost}
    for block, after in graph.successors.items():
        for target in after:
            before[target].append(block)
    from_entry, to_end = _cheapest(0, graph.successors, cost), _cheapest(END, before, cost)
    # Ways that pass the largest common block, where the work is: others may leave early.
    passable = [block for block in graph.blocks if block in from_entry and block in to_end and cost[block] == 0]
    anchor = max(passable, key=lambda block: len(graph.blocks[block]))
    from_anchor, to_anchor = _cheapest(anchor, graph.successors, cost), _cheapest(anchor, before, cost)
    least = from_entry[anchor] + to_end[anchor]
    path = set()
    for block in graph.blocks:
        ahead = from_entry.get(block, NEVER) + to_anchor.get(block, NEVER) + to_end[anchor]
        behind = from_entry[anchor] + from_anchor.get(block, NEVER) + to_end.get(block, NEVER)
        if min(ahead, behind) - cost[block] <= least + SLACK:
            path.add(block)

    loops: dict[int, tuple[set[int], str]] = {}  # by first block
    for last, first in graph.back_edges():
        if last in path and first in path:
            inside = path & graph.loop(last, first, before)
            others, rounds = loops.get(first) or (set(), _rounds(kernel, graph, last, first))
            loops[first] = inside | others, rounds
    on_path = [Loop(graph.indices(inside), rounds) for inside, rounds in loops.values()]
    return CommonPath(kernel, graph.indices(path), on_path)


def _cheapest(start: int, edges: dict[int, list[int]], cost: dict[int, int]) -> dict[int, int]:
    """The least cost of a way from `start` to each block, both counted."""
    found: dict[int, int] = {}
    queue = [(cost[start], start)]
    while queue:
        price, block = heapq.heappop(queue)
        if block not in found:
            found[block] = price
            for target in edges.get(block, []):
                heapq.heappush(queue, (price + cost[target], target))
    return found


def _is_rare(graph: Graph, block: int, covered: Coverage, first_warp: bool) -> bool:
    """By majority. BSYNC, where threads meet again, belongs to what is ahead and has no vote."""
    code = (graph.kernel.code[index] for index in graph.blocks[block])
    votes = [covered.is_rare(one, first_warp) for one in code if not one.opcode.startswith("BSYNC")]
    return 2 * sum(votes) > len(votes)


def _rounds(kernel: Kernel, graph: Graph, last: int, first: int) -> str:
    """The kind of rounds of a loop, by the source lines of the branch that closes it and of where it begins."""
    text = source_lines()
    lines = [*kernel.code[graph.blocks[last][-1]].lines, *kernel.code[first].lines]
    for line in lines:
        for piece, rounds in ROUNDS.items():
            if piece in text.get(line, ""):
                return rounds
    shown = "; ".join(f"{file}:{number} {text.get((file, number), '').strip()}" for file, number in lines)
    raise ValueError(f"{kernel.architecture} {kernel.name}: how many rounds has the loop at {shown}?")
