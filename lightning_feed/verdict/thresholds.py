"""Thresholds of the verdict: each number that decides a bottleneck, a cause, a grade or a remedy, and its reason.

Names end in their unit, if they have one: ``_PCT`` is percent, ``_SHARE`` a share from 0 to 1, ``_MS`` and ``_S`` are
times. Unless a docstring says otherwise, a value at its threshold counts as over it.
"""

# --- the bottleneck and its grade ---------------------------------------------------------------------------------

FRAMEWORK_PCT = 10.0
"""Limit of the time between steps, in percent of a step. Twice the other limits, because Lightning's own work between
two steps, which no setting removes, is part of it."""
COPY_PCT = 5.0
"""Limit of the copy to the device, in percent of a step: the same as for data."""
DATA_PCT = 5.0
"""Limit of waiting for data, in percent of a step: the lower limit of TensorFlow's input-pipeline analyzer."""
MODERATE_PCT = 10.0
"""Waiting for data from which a run is moderately data-bound, in percent of a step: between the other two limits."""
HIGH_PCT = 20.0
"""Waiting for data from which a run is highly data-bound, in percent of a step: the upper limit of TensorFlow's
input-pipeline analyzer."""
HEADLINE_PCT = 10.0
"""Share of a step, in percent, below which a part is not the headline if computing takes more."""
CLOSE_SHARE = 0.1
"""Distance from a limit, as a share of the limit, below which confidence is lower: another run may cross the limit."""
MODEL_SHARE = 0.95
"""Smallest time of the model alone, as a share of a step, from which a faster loader gains nothing."""
MODEL_MOST_SHARE = 1.1
"""Largest possible time of the model alone, as a share of a step, with some room for noise. A longer time shows that
something disturbed that experiment."""
MODEL_FAR_RATIO = 1.5
"""Smallest ratio of ``compute_ms`` to the step time of the model alone for which the model is not the cause. A smaller
ratio may come from workers that run on the model's CPUs."""
TOY_STEP_MS = 2.0
"""Steps below this belong to toy models: no loader setting makes them faster."""

# --- causes of waiting for data -----------------------------------------------------------------------------------

RUN_QUEUE_PCT = 30.0
"""Smallest share of a thread's or worker's time, in percent, spent waiting for a CPU that counts as a lack of CPUs."""
THROTTLED_PCT = 20.0
"""Smallest share of the scheduler's periods, in percent, in which the CPU quota is used up, for the cause
``oversubscribed``."""
CPU_PRESSURE_PCT = 30.0
"""Smallest share of the time, in percent, in which some task waits for a CPU that counts as a lack of CPUs. It is used
where the workers' own waits are unknown, or are not the limit."""
READY_WAIT_SHARE = 0.5
"""Smallest share of waiting in which the training thread lacked a CPU, for the cause ``oversubscribed``."""
PIN_SHARE = 0.5
"""Smallest mean wait for the pin thread, as a share of the mean wait for a batch, for the cause ``pin thread``."""
HEAD_OF_LINE_PCT = 25.0
"""Smallest ``head_of_line_pct`` for the cause ``head of line``."""
HANDOVER_PCT = 80.0
"""Smallest ``handover_pct`` for the cause ``hand-over``. It is high, because even taking a ready batch needs a
millisecond: if the queue is empty only sometimes, much of the waiting still begins with batches ready."""
QUEUE_READY_SHARE = 0.5
"""Smallest share of the queue that is ready on average, for the cause ``jitter``. Workers in lockstep deliver batches
in bursts, and then the queue is less than half full: (workers - 1) / 2 of at least ``workers`` batches are ready."""
BUSY_PCT = 70.0
"""Smallest share of the workers' time on a CPU, or ready to run, in percent, from which workers count as busy, and are
too slow in any order of batches. The same share of a sample's time on a CPU makes ``cpu`` the cause."""
BLOCKED_PCT = 50.0
"""Smallest share of the workers' time, in percent, from which workers count as blocked. Between this and
:data:`BUSY_PCT`, the cause is ``cpu`` with lower confidence."""
WARM_PCT = 80.0
"""Smallest share of bytes read from the page cache, in percent, from which the disk is not the cause."""
DISK_MB_PER_S = 0.05
"""Rate of reading from storage below which workers do not wait for storage: even a slow disk with 100 random reads of
4 kB a second delivers more."""
IO_PRESSURE_PCT = 20.0
"""Smallest share of the time, in percent, in which some task waits for storage, for the cause ``cold reads``. It is
used where the bytes of the page cache are unknown."""
FASTER_RATIO = 1.25
"""Speed-up of the loader with one change, such as files in memory, from which what was left out is the cause."""
NO_FASTER_RATIO = 1.1
"""Speed-up of the loader with one change below which what was left out is not the cause."""
QUEUE_SHARE = 0.1
"""Smallest time spent waiting for a CPU that the evidence mentions, as a share of the loading time."""

# --- causes of the other parts of a step --------------------------------------------------------------------------

NAMED_SHARE = 0.5
"""Smallest share of the time between steps spent in hooks for which hooks are the cause, even if the host is known to
wait for the device in each step."""
HOOKS_NAMED = 3
"""Number of hooks that the evidence names: the longest."""
MANY_TENSORS = 8
"""Number of tensors from which a batch counts as many small tensors, if they are small on average."""
SMALL_TENSOR_BYTES = 64 * 1024
"""Largest mean size of a tensor, in bytes, that counts as small."""
BUSY_DEVICE_SHARE = 0.9
"""Smallest share of the step itself in which the device runs kernels that counts as busy all the time. NVML showed 97
to 100 % for a ResNet-50 on an H200, and 16 to 47 % for steps that the host limits."""
MOSTLY_IDLE_SHARE = 0.5
"""Smallest share of the step itself in which the device is idle from which a wait for the device is not the cause: the
host can wait at most as long as the device is busy."""
LAUNCH_SHARE = 0.9
"""Smallest CPU time of the training thread for the cause ``launch``, as a share of the time of the step itself without
the backward pass. The device must have been seen idle, too."""

# --- evidence -----------------------------------------------------------------------------------------------------

SLOW_START_S = 1.0
"""Smallest time to the first batch of an epoch that the evidence mentions, in seconds."""
WAITS_NAMED = 2
"""Number of lines that wait for the device that the evidence names."""
SLACK_SHARE = 0.01
"""Smallest hidden wait that the evidence mentions, as a share of a step."""

# --- validation and checkpoints -----------------------------------------------------------------------------------

BESIDE_LEAST_S = 2.0
"""Number of seconds that validation and checkpoints must take together to get a verdict or a note."""
BESIDE_NOTED_SHARE = 0.15
"""Share of the wall time that validation and checkpoints must take together to get a note."""
BESIDE_MOST_SHARE = 0.25
"""Share of the training time that validation or checkpoints should take at most after the advised change."""
RARER_FACTORS = (2, 5, 10)
"""Factors by which validation may run less often."""

# --- remedies and notes -------------------------------------------------------------------------------------------

FREE_CPUS_SHARE = 1 / 8
"""Smallest share of this rank's CPUs, beside those of the workers and of the training thread, for which more workers
are a remedy that was not tried. With fewer free CPUs, more workers gain a few percent at most."""
LEAST_GAIN_PCT = 5.0
"""Smallest saving of a printed remedy, in percent of an epoch."""
LEAST_UNSURE_GAIN_PCT = 10.0
"""Smallest saving of a printed remedy, in percent of an epoch, if confidence is low."""
MOST_REMEDIES = 3
"""Number of remedies that are printed: the largest savings."""
MOST_NOTES = 3
"""Number of notes that are printed."""
RARELY_STEPS = 50
"""Steps between two updates of the progress bar, or two calls of the loggers, after the advised change."""
