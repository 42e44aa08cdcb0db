"""What to change about a DaliDataModule, whose pipelines load in threads of DALI's own."""

from lightning_feed.watch.verdict.diagnosis import Cause, LoopFacts, Measurements, Remedy


def dali_remedies(measured: Measurements, cause: Cause) -> list[Remedy]:
    """What there is to change where training waits for DALI, the most promising first; none for a wait by epochs or
    by ranks, on which none of its settings bears."""
    facts = measured.facts
    if cause in ("epoch start", "one rank"):
        return []
    if cause == "oversubscribed":
        return dali_on_the_gpu(facts) + _fewer_threads(facts)
    if cause in ("jitter", "head of line"):
        return _deeper(facts) + dali_on_the_gpu(facts)
    return dali_on_the_gpu(facts) + _more_threads(facts) + _deeper(facts) + _on_the_cpu(facts)


def dali_on_the_gpu(facts: LoopFacts) -> list[Remedy]:
    """Nothing where it works there, or the model does not."""
    if facts.dali_device != "cpu" or facts.device_type != "cuda":
        return []
    return [
        Remedy(
            code='DaliDataModule(device="gpu")',
            why="DALI decodes and augments on the GPU, where its batches stay (how fast was not measured)",
            changes="dali_device='cuda'",
        )
    ]


def _on_the_cpu(facts: LoopFacts) -> list[Remedy]:
    if facts.dali_device != "cuda":
        return []
    return [
        Remedy(
            code='DaliDataModule(device="cpu")',
            why="to compare: the CPUs decode, and the GPU has the step alone to do",
            changes="dali_device='cpu'",
        )
    ]


def _more_threads(facts: LoopFacts) -> list[Remedy]:
    threads, cpus = facts.dali_threads, facts.usable_cpus
    if threads is None or cpus is None or threads >= cpus:
        return []
    return [_threads(threads, cpus, cpus)]


def _fewer_threads(facts: LoopFacts) -> list[Remedy]:
    threads, cpus = facts.dali_threads, facts.usable_cpus
    if threads is not None and cpus is not None and threads > cpus:
        return [_threads(threads, cpus, cpus)]
    return [
        Remedy(
            code="torch.set_num_threads(1)",
            why="if threads of the training process take the CPUs of DALI's; else other programs do",
        )
    ]


def _threads(now: int, then: int, cpus: int) -> Remedy:
    return Remedy(
        code=f"DaliDataModule(dali=DaliOptions(threads={then}))",
        why=f"threads {now} -> {then}; {cpus} CPU{'' if cpus == 1 else 's'} may be used",
        changes=f"dali_threads={then}",
    )


def _deeper(facts: LoopFacts) -> list[Remedy]:
    if facts.dali_prefetch is None:
        return []
    deeper = 2 * facts.dali_prefetch
    return [
        Remedy(
            code=f"DaliDataModule(dali=DaliOptions(prefetch={deeper}))",
            why=f"prefetch {facts.dali_prefetch} -> {deeper}: batches in stock bridge slow ones, where DALI is fast "
            "enough in the mean",
            changes=f"dali_prefetch={deeper}",
        )
    ]
