"""Sums that ranks can add: entries and their results. Compared with single values in tests/unit/metrics."""

from __future__ import annotations

import math

import pytest
import torch

from megafp8.metrics.records import from_json, to_json
from megafp8.metrics.tensor_table import (
    CHANNELS,
    NUM_SUMS,
    StatisticsTable,
    build_partial_stats,
    error_sums,
    exponent_counts,
    outlier_keys,
)


def entries(*tables: StatisticsTable) -> StatisticsTable:
    """The tables of several ranks, reduced."""
    total = StatisticsTable(list(tables[0].rows), torch.device("cpu"))
    for table in tables:
        table.flush()
    total.sums = sum(table.sums for table in tables)
    total.maxima = torch.stack([table.maxima for table in tables]).amax(0)
    return total


def test_parts_of_ranks_become_one_tensor() -> None:
    parts = []
    for values, amax, scales in ((10, 2.0, (4.0, 0.25)), (30, 3.0, (2.0, 1.0))):
        table = StatisticsTable(["a", "b"], torch.device("cpu"))
        quant_max, dequant_max = scales
        table.add(
            "b",
            build_partial_stats(
                {"values": values, "compared": values, "nonzero": values, "underflow": 1, "saturated": 2,
                 "signal": 100.0, "noise": 1.0},
                {"amax": amax, "quant_scale": quant_max, "dequant_scale": dequant_max},
                torch.tensor([1, 2, 3]),
                torch.ones(4),
            ),
        )  # fmt: skip
        parts.append(table)
    stats = entries(*parts).stats("b", "e4m3", 3)
    assert stats is not None
    assert (stats.num_values, stats.amax) == (40, 3.0)
    assert (stats.quant_scale_min, stats.quant_scale_max, stats.scale_spread_octaves) == (1.0, 4.0, 2.0)
    assert (stats.underflow_fraction, stats.saturated_fraction) == (2 / 40, 4 / 40)
    assert stats.sqnr_db == pytest.approx(20.0)
    assert stats.exponent_counts == (2, 4, 6)
    assert entries(*parts).stats("a", "e4m3", 3) is None, "no rank observed it"


def test_weights_are_compared_over_all_rows_or_one() -> None:
    table = StatisticsTable(["a", "b"], torch.device("cpu"))
    table.add_weight_sums("weight", ["a", "b"], torch.tensor([4.0, 12.0], dtype=torch.float64))
    table.add_weight_sums("update", ["a", "b"], [0.04, 0.12])
    table.add_weight_sums("codes", ["a", "b"], [10, 10])
    table.add_weight_sums("changed", ["b", "a"], [3, 1])
    assert table.update_stats(["a"]) == pytest.approx({"update_to_weight": 0.1, "codes_changed_fraction": 0.1})
    assert table.update_stats(["a", "b"]) == pytest.approx({"update_to_weight": 0.1, "codes_changed_fraction": 0.2})
    assert table.update_stats([]) == {"update_to_weight": None, "codes_changed_fraction": None}


def test_exponents_are_those_of_the_codes() -> None:
    """Every E4M3 and E5M2 code, against torch's own decoding."""
    for dtype, mantissa_bits, special in ((torch.float8_e4m3fn, 3, 0x7F), (torch.float8_e5m2, 2, 0x7C)):
        codes = torch.arange(256, dtype=torch.uint8)
        expected = [0] * (1 + (1 << (7 - mantissa_bits)))
        smallest = min(value for value in codes.view(dtype).double().tolist() if value > 0)
        for value in codes.view(dtype).double().tolist():
            if value == 0:
                expected[0] += 1
            elif math.isfinite(value):
                field = math.floor(math.log2(abs(value) / smallest)) - mantissa_bits + 1
                expected[max(1, 1 + field)] += 1
        found = exponent_counts(torch.bincount(codes, minlength=256), mantissa_bits, special)
        assert found.tolist() == expected


def test_no_square_overflows_or_underflows() -> None:
    for scale in (1e-38, 1e-20, 1.0, 1e38):
        values = torch.full((2, 64), scale)
        found = error_sums(values, values * 0.75, torch.tensor(scale))
        assert 10 * math.log10(found["signal"] / found["noise"]) == pytest.approx(20 * math.log10(4), rel=1e-5)
        assert found["local_db"] / found["local_runs"] == pytest.approx(20 * math.log10(4), rel=1e-5)


def test_the_largest_outlier_keeps_its_channel() -> None:
    calm = torch.ones(8)
    loud = torch.ones(8)
    loud[5] = 2.0**10
    still, moved = outlier_keys(torch.stack([calm, loud]), first_channel=16)
    assert still == 16 and moved.item() % CHANNELS == 21 and moved > still
    assert outlier_keys(torch.tensor([[0.0, 0.0, 5.0]])).tolist() == [-1], "no median to compare with"
    table = StatisticsTable(["a", "b", "c"], torch.device("cpu"))
    for name, channels, first in (("a", loud, 16), ("b", calm, None), ("c", loud[4:], 4)):
        table.add(name, build_partial_stats({"values": 8}, {"amax": 1024.0}, torch.zeros(1), channels), first)
    table.flush()
    host = table.to_host()
    stats = [host.stats(name, "e4m3", 0) for name in "abc"]
    assert [each.outlier_channel for each in stats] == [21, None, 5]
    assert [each.outlier_octaves for each in stats] == [10.0, None, 10.0]


def test_every_field_of_a_row_has_a_column() -> None:
    assert StatisticsTable(["a"], torch.device("cpu")).sums.shape == (1, NUM_SUMS)


def test_statistics_records_read_back(make_statistics) -> None:
    record = make_statistics(7, of_input={"sqnr_db": math.inf}, gradient_snr=0.5)
    again = from_json(to_json(record))
    assert again == record
    assert "staleness" not in to_json(record), "what is not there takes no room"
