"""A whole run: opens the model, measures, and makes a result, however the run ends."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from kvist.bench import samples as bench_samples
from kvist.bench.machine import describe_machine, load
from kvist.bench.quality.blend_report import blend_rows
from kvist.bench.quality.blend_run import BlendRun, ways
from kvist.bench.quality.divergence import load as load_model
from kvist.bench.quality.report import codec_row, copy_mb_s
from kvist.bench.quality.run import CodecRun, Screen, Subject, subject_of
from kvist.bench.quality.samples import Result, SampleLog, Settings
from kvist.bench.quality.texts import Texts
from kvist.bench.smollm2 import Progress, ensure_smollm2
from kvist.codec.payload import BlockCodec
from kvist.core.errors import ConfigError
from kvist.native import IMPLEMENTATION

DEMO_MODEL = "SmolLM2-135M-Instruct"


def open_subject(folder: Path | None, block_tokens: int, say: Progress) -> tuple[Subject, str]:
    """The model in `folder`, or the demo model, and its name.

    Raises:
        ConfigError: it cannot be had, or is none that Transformers can load.
        UnsupportedError: its KV is not one K and V a layer.
    """
    place = ensure_smollm2("float32", progress=say) if folder is None else folder
    if not (place / "config.json").is_file():
        raise ConfigError(f"{place} is no folder of a Hugging Face model", path="MODEL")
    try:
        model, tokenizer = load_model(place)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{place} cannot be loaded: {str(error).splitlines()[0]}", path="MODEL"
        ) from error
    return subject_of(model, tokenizer, block_tokens), place.name if folder else DEMO_MODEL


def measure(
    subject: Subject,
    codecs: Sequence[BlockCodec],
    texts: Texts,
    settings: Settings,
    screen: Screen,
    *,
    ratios: Sequence[float] = (),
    table: str = "",
    samples: Path | None = None,
) -> Result:
    """Measures `codecs`, and blend at `ratios`; `table` names the one that `codecs` were given.

    After Ctrl-C the result holds what was measured and is not `complete`.

    Raises:
        ConfigError: the texts are too few, or `samples` holds something else, or is of
            another table.
        UnsupportedError: there are ratios, and the model cannot be blended.
        OSError: `samples` cannot be read or written.
    """
    log = SampleLog(settings, samples)
    if table:
        log.use_table(table)
    runs: list[CodecRun | BlendRun] = []
    if codecs:
        runs.append(CodecRun(subject, codecs, texts, settings, log, screen))
    if ratios:
        runs.append(BlendRun(subject, ratios, texts.questions, settings, log, screen))
    screen.expect(sum(run.steps() for run in runs))
    result = Result(
        started=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        machine=describe_machine(),
        settings=settings,
        implementation=IMPLEMENTATION,
        table=table,
    )
    began_s = time.monotonic()
    try:
        for run in runs:
            run.run()
        result.complete = True
    except KeyboardInterrupt:
        screen.say("interrupted: this is what was measured")
    result.took_s = round(time.monotonic() - began_s, 1)
    result.machine = bench_samples.after(result.machine, load())
    names = [codec.name for codec in codecs]
    result.codecs = [codec_row(name, log) for name in names]
    result.copy_mb_s = copy_mb_s(log, names)
    result.blend = blend_rows(ways(ratios), log) if ratios else []
    return result
