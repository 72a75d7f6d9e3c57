"""Runs the tests of modules in this process and writes their outcomes; `torch_distributed.py` starts it twice."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import unittest
from pathlib import Path
from typing import Any

import counting
import torch


class Outcomes(unittest.TextTestResult):
    """Collects how each test ended."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.outcomes: dict[str, str] = {}

    def _note(self, test: unittest.TestCase, outcome: str) -> None:
        self.outcomes[".".join(test.id().split(".")[-2:])] = outcome

    def addSuccess(self, test: unittest.TestCase) -> None:
        super().addSuccess(test)
        self._note(test, "passed")

    def addExpectedFailure(self, test: unittest.TestCase, err: Any) -> None:
        super().addExpectedFailure(test, err)
        self._note(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        super().addSkip(test, reason)
        self._note(test, "skipped")

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        super().addError(test, err)
        self._note(test, "failed")

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        super().addFailure(test, err)
        self._note(test, "failed")

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
        super().addUnexpectedSuccess(test)
        self._note(test, "failed")


def main() -> None:
    """Runs and writes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path)
    parser.add_argument("modules", nargs="+")
    parser.add_argument("-k", dest="patterns", action="append", default=[])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    counting.start()
    loader = unittest.TestLoader()
    if arguments.patterns:
        loader.testNamePatterns = [p if "*" in p else f"*{p}*" for p in arguments.patterns]
    modules = [importlib.import_module(name) for name in arguments.modules]
    suite = unittest.TestSuite(loader.loadTestsFromModule(module) for module in modules)
    result = unittest.TextTestRunner(sys.stderr, verbosity=2, resultclass=Outcomes).run(suite)
    assert isinstance(result, Outcomes)
    arguments.result.write_text(json.dumps(result.outcomes))


main()
