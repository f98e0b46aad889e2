"""Directions of metrics (is a larger or a smaller value better?): as stated, else by the metric's name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from ada_loss.files import mapping_in, strict_json, write_atomically
from fpsim.checks import did_you_mean, shown

__all__ = [
    "MAXIMIZE",
    "MINIMIZE",
    "Directions",
    "by_name",
    "goals_of",
    "hint_for",
    "keep_directions",
    "read_directions",
    "stated",
]

MINIMIZE, MAXIMIZE = "minimize", "maximize"
FILE = "directions.json"  # in the folder of a sweep
# "1-accuracy", "1 - val_acc", "-loss"; "1-shot_accuracy" is none
SUBTRACTION = re.compile(r"\s*(?P<from>(1(\.0)?|100)?)(?P<spaces>\s*)[-\N{MINUS SIGN}]")
NEGATIONS = ("neg", "negative", "negated", "minus")  # turn the direction of what follows
# Terms of one word or more, as `_words` splits them. The longest that fits is taken first.
LARGER = (
    "accuracy acc auc auroc auprc precision recall specificity sensitivity kappa dice jaccard iou miou giou ciou "
    "map mar ap mrr ndcg dcg squad chunk_f1 f_1 f_beta fbeta fmeasure f_measure r_2 d_2 bleu sacrebleu rouge meteor "
    "chrf cider spice comet bertscore mcc corr corr_coef corrcoef corrcoeff correlation pearson pearsonr spearman "
    "spearmanr kendall concordance similarity explained_variance exact_match em hit hits success win reward return "
    "score quality silhouette completeness homogeneity likelihood psnr ssim snr sdr pesq stoi mos intelligibility "
    "signal_noise_ratio signal_distortion_ratio inception_score intersection_over_union io_u preserved top_1 top_5 "
    "true_positive true_negative tpr tnr positive_likelihood_ratio v_measure mutual_info rand critical_success_index "
    "dunn fowlkes_mallows_index visual_information_fidelity tschuprow "
    "theils_u cramers_v gleu nist bleurt sari mauve elbo vif aupr pass_1 pass_5 pass_10 pass_100 pass_k per_second "
    "throughput d_2_log_loss d_2_absolute_error d_2_brier d_2_pinball d_2_tweedie"
).split()
SMALLER = (
    "loss losses nll ppl perplexity error err mse rmse mae mape smape msle rmsle mase wer cer ter eer bits bpc bpb bpd "
    "bpw entropy crossentropy xent ce bce kl kld divergence deviance distance hinge brier poisson fid kid lpips "
    "fpr fnr false_positive false_negative fall_out edit_rate word_info_lost error_rate brier_score deviance_score "
    "tweedie_deviance_score davies_bouldin_score davies_bouldin spectral_angle ergas perceptual_image_patch_similarity "
    "deep_image_structure_and_texture_similarity dists "
    "negative_likelihood_ratio misclassification regret cost underflow overflow skipped seconds "
    "latency continuous_ranked_probability_score crps disparity huber tversky log_cosh ctc total_variation "
    "spatial_distortion_index spectral_distortion_index charcut runtime logcosh ece fvd fad mpjpe "
    "word_information_lost toxicity ranked_probability_score interval_score energy_score"
).split()
# These make a setting or a count of what stands beside them: a loss scale is not a loss.
OTHERS = set(
    "scale scales scaling lr learning weight weights weighting coefficient coef lambda temperature threshold norm "
    "grad gradient momentum decay target schedule curve matrix "
    # a change or a spread of what stands beside them: an accuracy_drop is not an accuracy
    "drop gap degradation decrease increase reduction improvement diff difference delta change std stddev variance "
    "uncertainty inverse reciprocal non".split()
)


def by_name(metric: str) -> str | None:
    """The direction that a metric's name tells; None where its words tell none, or both.

    >>> by_name("val_loss"), by_name("top5_acc"), by_name("neg_log_loss"), by_name("loss_scale")
    ('minimize', 'maximize', 'maximize', None)
    """
    words = _words(metric)
    if subtracted := SUBTRACTION.match(metric):
        first = _words(metric[subtracted.end() :])
        if subtracted["spaces"] or not subtracted["from"] or (first and _term(first, 0)[1] is not None):
            return None
    directions: set[str] = set()
    turned = False
    place = 0
    while place < len(words):
        length, direction = _term(words, place)
        if direction is not None:
            directions.add(direction)
        elif length == 1 and words[place] in NEGATIONS:
            turned = not turned
        elif length == 1 and words[place] in OTHERS:
            return None
        place += length
    if len(directions) != 1:
        return None
    (only,) = directions
    return _opposite(only) if turned else only


def _opposite(direction: str) -> str:
    return MAXIMIZE if direction == MINIMIZE else MINIMIZE


def _words(metric: str) -> list[str]:
    """The words of a name, in small letters: split at signs, and at digits and case where the whole is not known.

    >>> _words("val/mAP50"), _words("F1Score"), _words("TruePositives")
    (['val', 'map', '50'], ['f', '1', 'score'], ['true', 'positive'])
    """
    words: list[str] = []
    for part in re.findall(r"[^\W_]+", metric):
        letters, digits = re.fullmatch(r"(.*?)(\d*)", part, re.DOTALL).groups()  # type: ignore[union-attr]
        if (letters.lower(),) in TERMS:
            words += [letters.lower(), *([digits] if digits else [])]
        else:
            words += [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[^\W\dA-Z]+|\d+", part)]
    return [word[:-1] if word.endswith("s") and word not in WORDS and word[:-1] in WORDS else word for word in words]


def _term(words: list[str], place: int) -> tuple[int, str | None]:
    """The longest term at a place: how many words it has, and its direction; (1, None) where there is none."""
    for length in range(min(LONGEST, len(words) - place), 0, -1):
        term = tuple(words[place : place + length])
        if term in TERMS:
            return length, TERMS[term]
    return 1, None


TERMS: dict[tuple[str, ...], str | None] = {
    **{tuple(term.split("_")): MAXIMIZE for term in LARGER},
    **{tuple(term.split("_")): MINIMIZE for term in SMALLER},
    ("scale", "invariant"): None,
}
WORDS = {word for term in TERMS for word in term} | OTHERS
LONGEST = max(map(len, TERMS))


def goals_of(goal: object, first: str | None = None) -> dict[str, str]:
    """A goal as {metric: "minimize" or "maximize"}.

    goal: "minimize" or "maximize", of the first metric; or a mapping of metrics to these; None for none.
    first: the name of the first metric.
    Raises TypeError and ValueError for what is neither.
    """
    if goal is None:
        return {}
    if isinstance(goal, str):
        goal = {first: goal} if first is not None else {}
    if not isinstance(goal, Mapping):
        raise TypeError(
            f"Got the goal {shown(goal)}. Use 'minimize', 'maximize', or a mapping such as {{'val_loss': 'minimize'}}."
        )
    for metric, direction in goal.items():
        if not isinstance(metric, str) or direction not in (MINIMIZE, MAXIMIZE):
            hint = did_you_mean(direction, (MINIMIZE, MAXIMIZE))
            raise ValueError(
                f"Got the goal {shown(direction)} of the metric {shown(metric)}.{hint} Use 'minimize' or 'maximize'."
            )
    return dict(goal)


def stated(minimize: object = (), maximize: object = ()) -> dict[str, str]:
    """The directions that two lists of metrics state.

    Raises TypeError for what is not a list of names, ValueError for a metric in both.

    >>> stated(["wer"], ["speed"])
    {'wer': 'minimize', 'speed': 'maximize'}
    """
    lists: dict[str, list[str]] = {}
    for name, given in ((MINIMIZE, minimize), (MAXIMIZE, maximize)):
        if not isinstance(given, list | tuple | set | frozenset):
            raise TypeError(f"Got {name}={shown(given)}. Expected a list of metrics. Write {name}=[{shown(given)}].")
        lists[name] = [*given]
        for metric in lists[name]:
            if not isinstance(metric, str):
                raise TypeError(f"Got the metric {shown(metric)} in {name}. Expected a name.")
    both = [metric for metric in lists[MINIMIZE] if metric in lists[MAXIMIZE]]
    if both:
        raise ValueError(f"The metric {shown(both[0])} is in minimize and in maximize. Name it in one of them.")
    return {metric: name for name, metrics in lists.items() for metric in metrics}


class Directions:
    """The directions of metrics: as stated, else by their names.

    said: {metric: "minimize" or "maximize"}, as stated.

    >>> Directions({"speed": "maximize"}).of("speed"), Directions().of("speed"), Directions().of("val_loss")
    ('maximize', None, 'minimize')
    """

    def __init__(self, said: Mapping[str, str] | None = None) -> None:
        self.said = dict(said or {})

    def of(self, metric: str) -> str | None:
        """The direction of a metric; None where it is not known."""
        name = metric
        while name.startswith("metric.") and name not in self.said:  # the column of a metric named as another column
            name = name.removeprefix("metric.")
        return self.said.get(name) or by_name(name)

    def sign(self, metric: str) -> int:
        """1 where larger is better, -1 where smaller is; 0 where it is not known."""
        return {MAXIMIZE: 1, MINIMIZE: -1, None: 0}[self.of(metric)]

    def words(self, metric: str) -> str:
        """What stands beside a metric of which smaller is better; "" for others."""
        return "lower is better" if self.of(metric) == MINIMIZE else ""

    def __or__(self, other: Mapping[str, str]) -> Directions:
        return Directions({**self.said, **other})


def hint_for(metric: str) -> str:
    """How to state the direction of a metric, for an error."""
    return (
        f"State it: minimize=[{metric!r}] or maximize=[{metric!r}] in the sweep, in ada_loss.Results or on the command "
        f"line (--minimize {metric}), or Task(goal=...)."
    )


def read_directions(folder: Path) -> dict[str, str]:
    """The directions that are kept in the folder of a sweep; those of them that are none are passed over."""
    return {
        name: direction for name, direction in mapping_in(folder / FILE).items() if direction in (MINIMIZE, MAXIMIZE)
    }


def keep_directions(folder: Path, said: Mapping[str, str]) -> None:
    """Keep stated directions in the folder of a sweep, in addition to those that it has."""
    kept = read_directions(folder)
    if said and {**kept, **said} != kept:
        write_atomically(folder / FILE, strict_json({**kept, **said}).encode())
