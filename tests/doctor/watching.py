"""What a watch has written."""

from lockstep.doctor.judge.traces import read_traces


def trace_of(watch, directory):
    watch.finish()
    watch._writer.flush()
    return read_traces(directory, [0])[0]
