from specdec.bench.profile import summarise

RAW = """\
thread (12): device;run (specdec/a.py:1);step (verifier_service/engine.py:20);forward (specdec/model/runner.py:5) 60
thread (12): device;run (specdec/a.py:1);step (verifier_service/engine.py:25) 20
thread (11): MainThread;run (events.py:1);step (verifier_service/engine.py:99) 20
py-spy had nothing to say here
"""


def test_samples_are_shared_out_by_thread_and_by_function() -> None:
    summary = summarise(RAW)
    assert summary["num_samples"] == 100
    assert summary["threads"] == {"device": 0.8, "MainThread": 0.2}
    assert summary["own"] == {"forward (specdec/model/runner.py)": 0.6, "step (verifier_service/engine.py)": 0.4}
    assert summary["total"]["step (verifier_service/engine.py)"] == 1.0


def test_a_function_that_calls_itself_counts_once_a_sample() -> None:
    summary = summarise("thread (1): a;f (specdec/x.py:1);f (specdec/x.py:1);g (specdec/x.py:2) 4\n")
    assert summary["total"] == {"f (specdec/x.py)": 1.0, "g (specdec/x.py)": 1.0}
