"""Names of metrics with their direction as the libraries themselves publish it, written by a program.

torchmetrics 1.9.0: classes that state `higher_is_better`. scikit-learn 1.9.1: `get_scorer_names()`, of which
a larger value is better, and the functions behind them with the sign that `get_scorer` gives them. Keras 3.15.1:
losses, and the metrics that keras-tuner 1.4.8 lists as those to maximise.

"+" is for names of which larger is better, "-" for smaller. Each third name was not looked at while the rules were
written: see `HELD_OUT`.
"""

from __future__ import annotations

TORCHMETRICS = {
    "BERTScore": "+", "BLEUScore": "+", "BinaryAUROC": "+", "BinaryAccuracy": "+", "BinaryAveragePrecision": "+",
    "BinaryCalibrationError": "-", "BinaryCohenKappa": "+", "BinaryF1Score": "+", "BinaryFBetaScore": "+",
    "BinaryFairness": "-", "BinaryGroupStatRates": "-", "BinaryHammingDistance": "-", "BinaryHingeLoss": "-",
    "BinaryJaccardIndex": "+", "BinaryLogAUC": "+", "BinaryMatthewsCorrCoef": "+", "BinaryPrecision": "+",
    "BinaryRecall": "+", "CHRFScore": "+", "CalinskiHarabaszScore": "+", "CharErrorRate": "-", "ClusterAccuracy": "+",
    "CompletenessScore": "+", "ComplexScaleInvariantSignalNoiseRatio": "+", "ConcordanceCorrCoef": "+",
    "ContinuousRankedProbabilityScore": "-", "CosineSimilarity": "+", "CramersV": "+", "CriticalSuccessIndex": "+",
    "DaviesBouldinScore": "+", "DeepImageStructureAndTextureSimilarity": "-", "DiceScore": "+", "DunnIndex": "+",
    "EditDistance": "-", "ErrorRelativeGlobalDimensionlessSynthesis": "-", "ExplainedVariance": "+",
    "ExtendedEditDistance": "-", "FleissKappa": "+", "FowlkesMallowsIndex": "+", "GeneralizedDiceScore": "+",
    "HausdorffDistance": "-", "HomogeneityScore": "+", "JensenShannonDivergence": "-", "KLDivergence": "-",
    "LogCoshError": "-", "MatchErrorRate": "-", "MeanAbsoluteError": "-", "MeanAbsolutePercentageError": "-",
    "MeanIoU": "+", "MeanSquaredError": "-", "MeanSquaredLogError": "-",
    "MemorizationInformedFrechetInceptionDistance": "-", "MinkowskiDistance": "-", "ModifiedPanopticQuality": "+",
    "MultiScaleStructuralSimilarityIndexMeasure": "+", "MulticlassAUROC": "+", "MulticlassAccuracy": "+",
    "MulticlassAveragePrecision": "+", "MulticlassCalibrationError": "-", "MulticlassCohenKappa": "+",
    "MulticlassExactMatch": "+", "MulticlassF1Score": "+", "MulticlassFBetaScore": "+",
    "MulticlassHammingDistance": "-", "MulticlassHingeLoss": "-", "MulticlassJaccardIndex": "+",
    "MulticlassLogAUC": "+", "MulticlassMatthewsCorrCoef": "+", "MulticlassPrecision": "+", "MulticlassRecall": "+",
    "MultilabelAUROC": "+", "MultilabelAccuracy": "+", "MultilabelAveragePrecision": "+",
    "MultilabelCoverageError": "-", "MultilabelExactMatch": "+", "MultilabelF1Score": "+", "MultilabelFBetaScore": "+",
    "MultilabelHammingDistance": "-", "MultilabelJaccardIndex": "+", "MultilabelLogAUC": "+",
    "MultilabelMatthewsCorrCoef": "+", "MultilabelPrecision": "+", "MultilabelRankingAveragePrecision": "+",
    "MultilabelRankingLoss": "-", "MultilabelRecall": "+", "MutualInfoScore": "+",
    "NormalizedRootMeanSquaredError": "-", "PanopticQuality": "+", "PeakSignalNoiseRatio": "+",
    "PeakSignalNoiseRatioWithBlockedEffect": "+", "PearsonsContingencyCoefficient": "+", "Perplexity": "-",
    "ProcrustesDisparity": "-", "QualityWithNoReference": "+", "R2Score": "+", "ROUGEScore": "+",
    "RelativeAverageSpectralError": "-", "RelativeSquaredError": "-", "RetrievalAUROC": "+", "RetrievalFallOut": "-",
    "RetrievalHitRate": "+", "RetrievalMAP": "+", "RetrievalMRR": "+", "RetrievalNormalizedDCG": "+",
    "RetrievalPrecision": "+", "RetrievalPrecisionRecallCurve": "+", "RetrievalRPrecision": "+",
    "RetrievalRecall": "+", "RetrievalRecallAtFixedPrecision": "+", "RootMeanSquaredErrorUsingSlidingWindow": "-",
    "SQuAD": "+", "SacreBLEUScore": "+", "ScaleInvariantSignalDistortionRatio": "+",
    "ScaleInvariantSignalNoiseRatio": "+", "SignalDistortionRatio": "+", "SignalNoiseRatio": "+",
    "SourceAggregatedSignalDistortionRatio": "+", "SpatialCorrelationCoefficient": "+", "SpatialDistortionIndex": "-",
    "SpearmanCorrCoef": "+", "SpectralAngleMapper": "-", "SpectralDistortionIndex": "+",
    "StructuralSimilarityIndexMeasure": "+", "SymmetricMeanAbsolutePercentageError": "-", "TheilsU": "+",
    "TotalVariation": "-", "TranslationEditRate": "-", "TschuprowsT": "+", "UniversalImageQualityIndex": "+",
    "VMeasureScore": "+", "VisualInformationFidelity": "+", "WeightedMeanAbsolutePercentageError": "-",
    "WordErrorRate": "-", "WordInfoLost": "-", "WordInfoPreserved": "-",
}  # fmt: skip
SCORERS = {
    "accuracy": "+", "adjusted_mutual_info_score": "+", "adjusted_rand_score": "+", "average_precision": "+",
    "balanced_accuracy": "+", "completeness_score": "+", "d2_absolute_error_score": "+", "d2_brier_score": "+",
    "d2_log_loss_score": "+", "explained_variance": "+", "f1": "+", "f1_macro": "+", "f1_micro": "+",
    "f1_samples": "+", "f1_weighted": "+", "fowlkes_mallows_score": "+", "homogeneity_score": "+", "jaccard": "+",
    "jaccard_macro": "+", "jaccard_micro": "+", "jaccard_samples": "+", "jaccard_weighted": "+",
    "matthews_corrcoef": "+", "mutual_info_score": "+", "neg_brier_score": "+", "neg_log_loss": "+",
    "neg_max_error": "+", "neg_mean_absolute_error": "+", "neg_mean_absolute_percentage_error": "+",
    "neg_mean_gamma_deviance": "+", "neg_mean_poisson_deviance": "+", "neg_mean_squared_error": "+",
    "neg_mean_squared_log_error": "+", "neg_median_absolute_error": "+", "neg_negative_likelihood_ratio": "+",
    "neg_root_mean_squared_error": "+", "neg_root_mean_squared_log_error": "+", "normalized_mutual_info_score": "+",
    "positive_likelihood_ratio": "+", "precision": "+", "precision_macro": "+", "precision_micro": "+",
    "precision_samples": "+", "precision_weighted": "+", "r2": "+", "rand_score": "+", "recall": "+",
    "recall_macro": "+", "recall_micro": "+", "recall_samples": "+", "recall_weighted": "+", "roc_auc": "+",
    "roc_auc_ovo": "+", "roc_auc_ovo_weighted": "+", "roc_auc_ovr": "+", "roc_auc_ovr_weighted": "+",
    "top_k_accuracy": "+", "v_measure_score": "+",
}  # fmt: skip
SCORED_BY = {
    "accuracy_score": "+", "adjusted_mutual_info_score": "+", "adjusted_rand_score": "+",
    "average_precision_score": "+", "balanced_accuracy_score": "+", "brier_score_loss": "-", "completeness_score": "+",
    "d2_absolute_error_score": "+", "d2_brier_score": "+", "d2_log_loss_score": "+", "explained_variance_score": "+",
    "f1_score": "+", "fowlkes_mallows_score": "+", "homogeneity_score": "+", "jaccard_score": "+", "log_loss": "-",
    "matthews_corrcoef": "+", "max_error": "-", "mean_absolute_error": "-", "mean_absolute_percentage_error": "-",
    "mean_gamma_deviance": "-", "mean_poisson_deviance": "-", "mean_squared_error": "-", "mean_squared_log_error": "-",
    "median_absolute_error": "-", "mutual_info_score": "+", "negative_likelihood_ratio": "-",
    "normalized_mutual_info_score": "+", "positive_likelihood_ratio": "+", "precision_score": "+", "r2_score": "+",
    "rand_score": "+", "recall_score": "+", "roc_auc_score": "+", "root_mean_squared_error": "-",
    "root_mean_squared_log_error": "-", "top_k_accuracy_score": "+", "v_measure_score": "+",
}  # fmt: skip
KERAS = {
    "AUC": "+", "Accuracy": "+", "BinaryAccuracy": "+", "BinaryCrossentropy": "-", "BinaryFocalCrossentropy": "-",
    "CTC": "-", "CategoricalAccuracy": "+", "CategoricalCrossentropy": "-", "CategoricalFocalCrossentropy": "-",
    "CategoricalHinge": "-", "Circle": "-", "Dice": "-", "Hinge": "-", "Huber": "-", "KLDivergence": "-",
    "LogCosh": "-", "MeanAbsoluteError": "-", "MeanAbsolutePercentageError": "-", "MeanSquaredError": "-",
    "MeanSquaredLogarithmicError": "-", "Poisson": "-", "Precision": "+", "Recall": "+",
    "SensitivityAtSpecificity": "+", "SparseCategoricalAccuracy": "+", "SparseCategoricalCrossentropy": "-",
    "SparseTopKCategoricalAccuracy": "+", "SpecificityAtSensitivity": "+", "SquaredHinge": "-",
    "TopKCategoricalAccuracy": "+", "TrueNegatives": "+", "TruePositives": "+", "Tversky": "-", "accuracy": "+",
    "binary_accuracy": "+", "binary_crossentropy": "-", "binary_focal_crossentropy": "-", "categorical_accuracy": "+",
    "categorical_crossentropy": "-", "categorical_focal_crossentropy": "-", "categorical_hinge": "-", "circle": "-",
    "ctc": "-", "dice": "-", "hinge": "-", "huber": "-", "kl_divergence": "-", "log_cosh": "-",
    "mean_absolute_error": "-", "mean_absolute_percentage_error": "-", "mean_squared_error": "-",
    "mean_squared_logarithmic_error": "-", "poisson": "-", "sparse_categorical_accuracy": "+",
    "sparse_categorical_crossentropy": "-", "squared_hinge": "-", "tversky": "-",
}  # fmt: skip
ALL = [pair for names in (TORCHMETRICS, SCORERS, SCORED_BY, KERAS) for pair in sorted(names.items())]
HELD_OUT = dict(ALL[::3])
KNOWN = {name: truth for name, truth in ALL if name not in HELD_OUT}
