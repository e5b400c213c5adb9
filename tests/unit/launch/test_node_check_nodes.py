"""Which node is at fault, derived from the reports of a job's nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from megafp8.device.node_check_ranks import link_members, node_links
from megafp8.launch.node_check import (
    GIB,
    GpuState,
    GroupResult,
    NodeReport,
    clock_offset_s,
    evaluate_nodes,
    healthy_summary,
    read_report,
    write_report,
)

GPU = GpuState(
    index=3, name="H200", total_bytes=140 * GIB, used_bytes=GIB, uncorrected_errors=0, is_slowed=False
)  # fmt: skip


def groups_of(number: int, num_nodes: int, fails: Callable[[set[int]], bool]) -> tuple[GroupResult, ...]:
    """A node's groups. Groups with failing members report it."""
    members = [(number,), *(link_members(link, num_nodes) for link in node_links(number, num_nodes))]
    return tuple(
        GroupResult(members=some, bytes_per_s=None, error="timed out") if fails({*some})
        else GroupResult(members=some, bytes_per_s=1e9 * (1 + some[0]), error=None)
        for some in members
    )  # fmt: skip


def reports_of(num_nodes: int, fails: Callable[[set[int]], bool] = lambda _: False) -> list[NodeReport]:
    return [
        NodeReport(
            node=f"n{number}", problems=(), software="driver 580", gpus=(GPU,), clock_s=0.01 * number,
            groups=groups_of(number, num_nodes, fails),
        )
        for number in range(num_nodes)
    ]  # fmt: skip


def blamed(reports: list) -> dict[str, list[str]]:
    return evaluate_nodes([f"n{number}" for number in range(len(reports))], reports)


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4, 7, 8])
def test_links_form_a_ring_without_deadlock(num_nodes: int) -> None:
    """Each node tests its links in order. Some link is then always the next one of both its ends."""
    waiting = [node_links(node, num_nodes) for node in range(num_nodes)]
    links = {link_members(link, num_nodes) for own in waiting for link in own}
    assert len(links) == (num_nodes if num_nodes > 2 else num_nodes - 1)
    while any(waiting):
        ready = {own[0] for own in waiting if own
                 and all(waiting[end][0] == own[0] for end in link_members(own[0], num_nodes))}  # fmt: skip
        assert ready
        waiting = [own[1:] if own and own[0] in ready else own for own in waiting]


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 8])
def test_healthy_nodes_are_not_blamed(num_nodes: int) -> None:
    reports = reports_of(num_nodes)
    assert blamed(reports) == {}
    text = healthy_summary([report.node for report in reports], reports)
    assert text.startswith(f"{num_nodes} nodes passed, 1 x H200 each, slowest all-reduce 1.00 GB/s (n0")


@pytest.mark.parametrize("bad", range(5))
def test_only_the_unreachable_node_is_named(bad: int) -> None:
    wrong = blamed(reports_of(5, lambda members: bad in members and len(members) == 2))
    assert list(wrong) == [f"n{bad}"]
    assert "all-reduce with n" in wrong[f"n{bad}"][0] and "timed out" in wrong[f"n{bad}"][0]


def test_an_error_within_a_node_explains_its_links() -> None:
    wrong = blamed(reports_of(4, lambda members: 2 in members))
    assert wrong == {"n2": ["all-reduce within the node: timed out"]}


def test_a_failed_rendezvous_is_reported_without_another_cause() -> None:
    reports = [dataclasses.replace(report, rendezvous="at n0:1: no answer") for report in reports_of(3)]
    reports[0] = dataclasses.replace(reports[0], rendezvous=None)
    assert blamed(reports) == {f"n{number}": ["rendezvous: at n0:1: no answer"] for number in (1, 2)}
    reports[2] = dataclasses.replace(reports[2], clock_s=60.0)
    assert list(blamed(reports)) == ["n2"]


def test_one_broken_link_costs_one_node() -> None:
    assert list(blamed(reports_of(6, lambda members: members == {2, 3}))) == ["n3"]


def test_two_nodes_without_a_connection_are_both_named() -> None:
    assert list(blamed(reports_of(2, lambda members: len(members) == 2))) == ["n0", "n1"]


def test_a_failure_that_one_end_saw_counts() -> None:
    reports = reports_of(4)
    seen = tuple(dataclasses.replace(group, error="reset", bytes_per_s=None) if group.members == (1, 2) else group
                 for group in reports[2].groups)  # fmt: skip
    reports[2] = dataclasses.replace(reports[2], groups=seen)
    assert list(blamed(reports)) == ["n2"]


def test_a_node_without_a_report_is_named_and_explains_its_links() -> None:
    reports: list = reports_of(4, lambda members: 1 in members and len(members) == 2)
    reports[1] = None
    assert blamed(reports) == {"n1": ["no report in time"]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"clock_s": 60.0}, "60.0 s ahead of the others'"),
        ({"clock_s": -60.0}, "60.0 s behind the others'"),
        ({"software": "driver 570"}, "its software is driver 570; most nodes have driver 580"),
        ({"problems": ("disk: runs cannot be written: Read-only file system",)}, "Read-only"),
        (
            {"gpus": (dataclasses.replace(GPU, used_bytes=40 * GIB),)},
            "GPU 3: 40.0 of 140.0 GiB are in use by other processes",
        ),
        ({"gpus": (dataclasses.replace(GPU, uncorrected_errors=2),)}, "GPU 3: 2 uncorrected memory errors"),
        ({"gpus": (dataclasses.replace(GPU, is_slowed=True),)}, "GPU 3: its clock is throttled"),
    ],
)
def test_errors_of_a_node_are_reported(change: dict, words: str) -> None:
    reports = reports_of(4)
    reports[1] = dataclasses.replace(reports[1], **change)
    (said,) = blamed(reports).pop("n1")
    assert words in said
    assert list(blamed(reports)) == ["n1"]


def test_reports_read_back(tmp_path: Path) -> None:
    for report in [*reports_of(3), dataclasses.replace(reports_of(1)[0], rendezvous="no answer")]:
        write_report(tmp_path, report)
        assert read_report(tmp_path, report.node) == report
    assert read_report(tmp_path, "n7") is None
    (tmp_path / "n0.json").write_text('{"node": "n0"')
    assert read_report(tmp_path, "n0") is None


def test_clocks_are_compared_with_the_file_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    assert abs(clock_offset_s(tmp_path / "a")) < 30
    true = time.time
    monkeypatch.setattr(time, "time", lambda: true() + 100)
    assert 70 < clock_offset_s(tmp_path / "b") < 130
