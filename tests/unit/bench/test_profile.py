from specdec.bench.profile import summarise

RAW = """\
thread (12): device;run (device_thread.py:10);step (engine.py:20);forward (runner.py:5) 60
thread (12): device;run (device_thread.py:10);step (engine.py:25) 20
thread (11): MainThread;run (events.py:1);step (engine.py:99) 20
py-spy had nothing to say here
"""


def test_samples_are_shared_out_by_thread_and_by_function() -> None:
    summary = summarise(RAW)
    assert summary["num_samples"] == 100
    assert summary["threads"] == {"device": 0.8, "MainThread": 0.2}
    assert summary["own"] == {"forward (runner.py)": 0.6, "step (engine.py)": 0.4}
    assert summary["total"]["step (engine.py)"] == 1.0


def test_a_function_that_calls_itself_counts_once_a_sample() -> None:
    summary = summarise("thread (1): a;f (x.py:1);f (x.py:1);g (x.py:2) 4\n")
    assert summary["total"] == {"f (x.py)": 1.0, "g (x.py)": 1.0}
