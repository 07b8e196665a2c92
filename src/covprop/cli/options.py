"""The options that commands share: what they are called and what they say in --help."""

from typing import Annotated, TypeAlias

import typer

from covprop.cli.methods import MOST_SAMPLES, NAMES
from covprop.reference import SAMPLES

ARRAYS = ".npy, .npz, .csv or .pt; FILE.npz:NAME takes one of several arrays"

ModelName: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A torch.export archive (.pt2), an ONNX file (.onnx), or package.module:factory, a "
        "function without arguments that makes the network (found as python -m finds it).",
        show_default=False,
    ),
]
Mean: TypeAlias = Annotated[
    str, typer.Option(metavar="FILE", help=f"The mean of the input: {ARRAYS}.", show_default=False)
]
Covariance: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="The covariance of the input, (n, n), also for every input of a batch, or "
        "(*batch, n, n).",
    ),
]
Stddev: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="X|FILE", help="Instead: independent noise of this standard deviation, or these."
    ),
]
BatchDims: TypeAlias = Annotated[
    int,
    typer.Option(min=0, metavar="N", help="How many leading dimensions of the mean are a batch."),
]
Shape: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="1,8,8", help="The shape of the mean, if the file has another."),
]
Weights: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Weights for package.module:factory: .safetensors, or .pt."),
]
AllowPickle: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--allow-pickle", help="Load pickles too, which can run any code: only from who you trust."
    ),
]
Output: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--output", metavar="N|NAME", help="Which output, of a model that returns several."
    ),
]
MethodName: TypeAlias = Annotated[
    str, typer.Option("--method", metavar="NAME", help=f"One of {NAMES}.")
]
MethodNames: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        metavar="NAME",
        help=f"Of {NAMES}; may be given several times, and the first is judged. All by default.",
    ),
]
Seed: TypeAlias = Annotated[
    int, typer.Option(min=0, max=2**32 - 1, metavar="N", help="Of everything that is drawn.")
]
Json: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print one JSON object, and nothing else.")
]
Out: TypeAlias = Annotated[
    str | None, typer.Option(metavar="FILE", help="Write the moments: .npz, .pt or .json.")
]
Samples: TypeAlias = Annotated[
    int,
    typer.Option(min=2, max=MOST_SAMPLES, metavar="N", help="Of the network, to check with."),
]
PlainSamples: TypeAlias = Annotated[
    int | None,
    typer.Option(
        min=2,
        max=MOST_SAMPLES,
        metavar="N",
        help="Plain ones, for the reference; by default a control variate where it takes fewer, "
        f"and else {SAMPLES:,}.",
    ),
]
Tolerance: TypeAlias = Annotated[
    float | None,
    typer.Option(
        min=0,
        metavar="X",
        help="Exit with 3 if the first method's mean is off by more than this many standard "
        "deviations, or its covariance by more than this share.",
    ),
]
Label: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="N|FILE",
        help="The class to keep, N or N,N,... or a file of them; by default the network's own "
        "decision.",
    ),
]
Probability: TypeAlias = Annotated[
    float,
    typer.Option(metavar="P", help="With which the noise budget keeps the label."),
]
RequireProbability: TypeAlias = Annotated[
    float | None,
    typer.Option(
        min=0, max=1, metavar="P", help="Exit with 3 if a label is kept with less than this."
    ),
]
Radius: TypeAlias = Annotated[
    float | None,
    typer.Option(min=0, metavar="X", help="Of the attack by PGD; by default the noise's length."),
]
Norm: TypeAlias = Annotated[
    str, typer.Option(metavar="2|inf", help="In which the attack is bounded.")
]
Report: TypeAlias = Annotated[
    str | None, typer.Option(metavar="FILE.html", help="Write a page with figures.")
]
DemoReport: TypeAlias = Annotated[
    str, typer.Option("--report", metavar="FILE.html", help="The page that it ends with.")
]
