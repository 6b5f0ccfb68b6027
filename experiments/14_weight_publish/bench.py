"""Weight publishes to replicas in processes of their own, beside one raw gloo broadcast of the same bytes."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from asyncrlhf.bench.weights import Shape, Variant, measure
from asyncrlhf.validation import check, check_choice, check_range

SHAPES = {
    "0.7M": Shape(layers=4, hidden=128, intermediate=320, key_value=64, vocabulary=64),
    "10M": Shape(layers=8, hidden=320, intermediate=864, key_value=160, vocabulary=4096),
    "135M": Shape(layers=30, hidden=576, intermediate=1536, key_value=192, vocabulary=49152),  # SmolLM2-135M
}


def variants(transports: Sequence[str]) -> list[Variant]:
    """Each transport with and without checksums."""
    return [Variant(transport, checksum=on) for transport in transports for on in (True, False)]


def _options(args: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench weights", description=__doc__)
    parser.add_argument("--sizes", default=",".join(SHAPES), help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--transports", default="collective,object_store,disk")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--receivers", type=int, default=2)
    parser.add_argument("--bucket-mb", type=float, default=32.0)
    parser.add_argument("--learner-threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--disk-path", type=Path, default=None, help="where the disk's versions go; default: a temporary folder"
    )
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(list(args))
    options.sizes, options.transports = options.sizes.split(","), options.transports.split(",")
    for size in options.sizes:
        check_choice("--sizes", size, tuple(SHAPES))
    for transport in options.transports:
        check_choice("--transports", transport, ("collective", "object_store", "disk"))
    check_range("--repeats", options.repeats, low=1)
    check_range("--receivers", options.receivers, low=1)
    check_range("--bucket-mb", options.bucket_mb, low=0, exclusive_low=True)
    check_range("--learner-threads", options.learner_threads, low=1)
    check(options.disk_path is None or options.disk_path.is_dir(), f"--disk-path={options.disk_path} is not a folder.")
    return options


def run(args: Sequence[str] = ()) -> dict[str, Any]:
    """Run the benchmark with command-line ``args``; prints the ratios and returns what it writes to ``--out``."""
    import ray

    options = _options(args)
    torch.set_num_threads(options.learner_threads)
    started_here = not ray.is_initialized()
    if started_here:
        ray.init(
            include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR, object_store_memory=4 * 2**30
        )
    try:
        ways = variants(options.transports)
        sizes = [
            {
                "size": name,
                **measure(
                    SHAPES[name], ways, receivers=options.receivers, repeats=options.repeats,
                    bucket_mb=options.bucket_mb, disk_path=options.disk_path,
                ),
            }
            for name in options.sizes
        ]  # fmt: skip
    finally:
        if started_here:
            ray.shutdown()
    result = {"learner_threads": options.learner_threads, "bucket_mb": options.bucket_mb, "sizes": sizes}
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    report(result)
    return result


def report(result: Mapping[str, Any]) -> None:
    """Print a table for each size."""
    print(
        "ratio: seconds of a raw gloo broadcast over seconds of a publish, snapshot to last answer; stall: the learner "
        f"stands still; fenced: the same beside a forward pass; {result['learner_threads']} learner thread(s)"
    )
    for size in result["sizes"]:
        print(
            f"\n{size['size']} parameters, {size['bytes'] / 1e6:.1f} MB to {size['receivers']} receivers, "
            f"{size['repeats']} rounds; raw broadcast {size['raw_gb_per_second']:.2f} GB/s"
        )
        print(f"{'':32}{'ratio (least, most)':>24}{'GB/s':>8}{'publish s':>11}{'stall s':>10}{'fenced s':>10}")
        for label, way in size["ways"].items():
            ratio = f"{way['ratio_median']:.2f} ({way['ratio_min']:.2f}, {way['ratio_max']:.2f})"
            print(
                f"{label:32}{ratio:>24}{way['gb_per_second']:8.2f}{way['publish_seconds']:11.4f}"
                f"{way['stall_seconds']:10.4f}{way['fenced_stall_seconds']:10.4f}"
            )
