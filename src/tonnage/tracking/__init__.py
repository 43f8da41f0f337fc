"""Other tools that show a run: TensorBoard, Weights & Biases, MLflow, Trackio.

    trackers.py    what rank 0 does: start a process for each, and wait a moment for them at the end
    sender.py      that process: what is new in the run's files goes to one tracker
    news.py        what is new: steps, evaluations and answers after a place in the files
    told.py        what is told of the config, and of errors
    back_ends.py   the trackers: start, log, end

Nothing is handed over. ``metrics.jsonl`` and ``samples.jsonl`` are written anyway, and a sender follows them as the
progress display does: they are the queue, so a tracker that is slow or hangs takes neither memory nor time of training,
and loses nothing until the run is over. What a tracker has, and the id of its own run, is noted in
``trackers/NAME.json``: a run that goes on from a checkpoint goes on there too, with what had not been sent.
"""
