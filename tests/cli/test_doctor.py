"""``autoplan doctor``: real checks on this machine, and what a broken one is told."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from autoplan.cli import doctor
from tests.support.cli import Invoke


def test_this_machine_is_examined(invoke: Invoke) -> None:
    done = invoke("doctor", "--json")
    answer = json.loads(done.stdout)
    findings = {finding["what"]: finding for finding in answer["findings"]}
    assert answer["schema"] == 1 and {"python", "packages", "solvers", "processes"} <= set(findings)
    assert findings["processes"]["state"] == "ok", findings["processes"]["said"]
    assert "torch 2." in findings["packages"]["said"]
    assert done.exit_code == (0 if answer["healthy"] else 1)


def test_a_check_that_breaks_is_a_finding_and_exit_code_1(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def _broken_thing() -> Iterator[doctor.Finding]:
        raise OSError("no such device")

    monkeypatch.setattr(doctor, "CHECKS", (doctor._python, _broken_thing))
    done = invoke("doctor")
    assert done.exit_code == 1
    assert done.stdout.splitlines()[-1].split() == ["FAIL", "broken", "thing", "OSError:", "no", "such", "device"]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_PACKAGES", ("torch", "no-such-package"))
    found = list(doctor._packages())
    assert [finding.state for finding in found] == ["ok", "FAIL"]
    assert found[1].attempt == "pip install no-such-package"


def test_a_warning_is_no_failure(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_LEAST_SHARED_BYTES", 2**60)
    monkeypatch.setattr(doctor, "CHECKS", (doctor._shared_memory,))
    assert invoke("doctor").exit_code == 0
