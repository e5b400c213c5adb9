import numpy as np
import pytest

from megafp8.analysis.pairing import Pair
from megafp8.analysis.plot_comparison import MAX_POINTS, DrawnRecipe, plot_training, thinned
from megafp8.analysis.plotting import INK
from megafp8.analysis.runs import load_run
from megafp8.analysis.seed_statistics import Curve
from megafp8.metrics.records import EventRecord
from megafp8.metrics.sinks.jsonl import JsonlSink


@pytest.mark.parametrize("num_points", [0, 1, MAX_POINTS, MAX_POINTS + 1, 6200])
def test_a_long_curve_is_drawn_with_fewer_points_and_its_last_one(num_points: int) -> None:
    x = np.arange(num_points, dtype=np.float64)
    curve = thinned(Curve(x=x, mean=x + 1, low=x - 1, high=x + 2))
    assert MAX_POINTS / 2 < len(curve.x) <= MAX_POINTS or len(curve.x) == num_points
    assert curve.x[-1:].tolist() == x[-1:].tolist()
    assert np.array_equal(curve.mean, curve.x + 1) and np.array_equal(curve.low, curve.x - 1)
    assert np.array_equal(curve.high, curve.x + 2)
    assert len(set(np.diff(curve.x))) <= 1, "evenly spaced"


def test_the_training_loss_shows_where_a_phase_of_data_began(write_run) -> None:
    folder = write_run("run", [3.0, 2.0, 1.5, 1.4])
    sink = JsonlSink(folder / "records.jsonl")
    for step, name in ((1, "web"), (3, "anneal")):
        sink.write(EventRecord(step=step, name="data phase", detail=f"{name}, from sample {8 * step}"))
    sink.close()
    run = load_run(folder)
    assert run.data_phases == {"anneal": 2000}
    figure = plot_training([DrawnRecipe(name="run", pairs=(Pair(run, run),), color=INK)])
    assert [text.get_text() for text in figure.axes[0].texts] == ["data: anneal"]
