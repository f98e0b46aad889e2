"""Names of metrics with their true direction, typed from the documentation of torchmetrics, scikit-learn and Keras.

"+" is for names of which larger is better, "-" for smaller, "?" for those that have no direction.
Each third name of a list, alphabetically, was kept apart while the rules were written: see `HELD_OUT`.
"""

from __future__ import annotations

TORCHMETRICS = {
    "Accuracy": "+", "AUROC": "+", "AveragePrecision": "+", "CalibrationError": "-", "CohenKappa": "+",
    "ConfusionMatrix": "?", "DiceScore": "+", "ExactMatch": "+", "F1Score": "+", "FBetaScore": "+",
    "HammingDistance": "-", "HingeLoss": "-", "JaccardIndex": "+", "MatthewsCorrCoef": "+", "Precision": "+",
    "Recall": "+", "RecallAtFixedPrecision": "+", "Specificity": "+", "ROC": "?",
    "ConcordanceCorrCoef": "+", "CosineSimilarity": "+", "CriticalSuccessIndex": "+", "ExplainedVariance": "+",
    "KendallRankCorrCoef": "+", "KLDivergence": "-", "LogCoshError": "-", "MeanAbsoluteError": "-",
    "MeanAbsolutePercentageError": "-", "MeanSquaredError": "-", "MeanSquaredLogError": "-", "MinkowskiDistance": "-",
    "NormalizedRootMeanSquaredError": "-", "PearsonCorrCoef": "+", "R2Score": "+", "RelativeSquaredError": "-",
    "SpearmanCorrCoef": "+", "SymmetricMeanAbsolutePercentageError": "-", "TweedieDevianceScore": "-",
    "WeightedMeanAbsolutePercentageError": "-", "BLEUScore": "+", "CharErrorRate": "-", "CHRFScore": "+",
    "EditDistance": "-", "ExtendedEditDistance": "-", "MatchErrorRate": "-", "Perplexity": "-", "ROUGEScore": "+",
    "SacreBLEUScore": "+", "SQuAD": "+", "TranslationEditRate": "-", "WordErrorRate": "-", "WordInfoLost": "-",
    "WordInfoPreserved": "+", "FrechetInceptionDistance": "-", "InceptionScore": "+", "KernelInceptionDistance": "-",
    "LearnedPerceptualImagePatchSimilarity": "-", "PeakSignalNoiseRatio": "+",
    "StructuralSimilarityIndexMeasure": "+", "UniversalImageQualityIndex": "+", "SpectralAngleMapper": "-",
    "SignalNoiseRatio": "+", "SignalDistortionRatio": "+", "ScaleInvariantSignalNoiseRatio": "+",
    "PerceptualEvaluationSpeechQuality": "+", "ShortTimeObjectiveIntelligibility": "+",
    "MeanAveragePrecision": "+", "IntersectionOverUnion": "+", "PanopticQuality": "+", "RetrievalMAP": "+",
    "RetrievalMRR": "+", "RetrievalNormalizedDCG": "+", "RetrievalHitRate": "+", "RetrievalFallOut": "-",
    "RetrievalPrecision": "+", "RetrievalRecall": "+", "AdjustedRandScore": "+", "MutualInfoScore": "+",
    "DaviesBouldinScore": "-", "CalinskiHarabaszScore": "+", "VMeasureScore": "+",
    "ErrorRelativeGlobalDimensionlessSynthesis": "-",
}  # fmt: skip
SCIKIT_LEARN = {
    "accuracy": "+", "balanced_accuracy": "+", "top_k_accuracy": "+", "average_precision": "+",
    "neg_brier_score": "+", "f1": "+", "f1_micro": "+", "f1_macro": "+", "f1_weighted": "+", "f1_samples": "+",
    "neg_log_loss": "+", "precision": "+", "precision_macro": "+", "recall": "+", "recall_weighted": "+",
    "jaccard": "+", "jaccard_micro": "+", "roc_auc": "+", "roc_auc_ovr": "+", "roc_auc_ovo_weighted": "+",
    "d2_log_loss_score": "+", "d2_brier_score": "+", "adjusted_mutual_info_score": "+", "adjusted_rand_score": "+",
    "completeness_score": "+", "fowlkes_mallows_score": "+", "homogeneity_score": "+", "mutual_info_score": "+",
    "normalized_mutual_info_score": "+", "rand_score": "+", "v_measure_score": "+", "explained_variance": "+",
    "r2": "+", "neg_max_error": "+", "neg_mean_absolute_error": "+", "neg_mean_squared_error": "+",
    "neg_root_mean_squared_error": "+", "neg_mean_squared_log_error": "+", "neg_root_mean_squared_log_error": "+",
    "neg_median_absolute_error": "+", "neg_mean_poisson_deviance": "+", "neg_mean_gamma_deviance": "+",
    "neg_mean_absolute_percentage_error": "+", "d2_absolute_error_score": "+", "matthews_corrcoef": "+",
    "positive_likelihood_ratio": "+", "neg_negative_likelihood_ratio": "+",
    "brier_score_loss": "-", "log_loss": "-", "hamming_loss": "-", "hinge_loss": "-", "zero_one_loss": "-",
    "max_error": "-", "mean_absolute_error": "-", "mean_pinball_loss": "-", "mean_squared_error": "-",
    "median_absolute_error": "-", "mean_tweedie_deviance": "-", "d2_pinball_score": "+", "d2_tweedie_score": "+",
    "r2_score": "+", "root_mean_squared_error": "-", "coverage_error": "-", "label_ranking_loss": "-",
    "label_ranking_average_precision_score": "+", "dcg_score": "+", "ndcg_score": "+", "cohen_kappa_score": "+",
    "davies_bouldin_score": "-", "silhouette_score": "+", "calinski_harabasz_score": "+", "fbeta_score": "+",
    "det_curve": "?", "confusion_matrix": "?", "negative_likelihood_ratio": "-",
}  # fmt: skip
KERAS = {
    "Accuracy": "+", "BinaryAccuracy": "+", "CategoricalAccuracy": "+", "SparseCategoricalAccuracy": "+",
    "TopKCategoricalAccuracy": "+", "SparseTopKCategoricalAccuracy": "+", "BinaryCrossentropy": "-",
    "CategoricalCrossentropy": "-", "SparseCategoricalCrossentropy": "-", "KLDivergence": "-", "Poisson": "-",
    "MeanSquaredError": "-", "RootMeanSquaredError": "-", "MeanAbsoluteError": "-",
    "MeanAbsolutePercentageError": "-", "MeanSquaredLogarithmicError": "-", "CosineSimilarity": "+",
    "LogCoshError": "-", "R2Score": "+", "AUC": "+", "Precision": "+", "Recall": "+", "TruePositives": "+",
    "TrueNegatives": "+", "FalsePositives": "-", "FalseNegatives": "-", "PrecisionAtRecall": "+",
    "RecallAtPrecision": "+", "SensitivityAtSpecificity": "+", "SpecificityAtSensitivity": "+", "F1Score": "+",
    "FBetaScore": "+", "IoU": "+", "BinaryIoU": "+", "MeanIoU": "+", "OneHotIoU": "+", "OneHotMeanIoU": "+",
    "Hinge": "-", "SquaredHinge": "-", "CategoricalHinge": "-", "Mean": "?", "Sum": "?",
    "ConcordanceCorrelation": "+", "PearsonCorrelation": "+",
    "val_loss": "-", "val_acc": "+", "val_accuracy": "+", "val_mae": "-", "val_mse": "-", "val_auc": "+",
    "mean_io_u": "+", "val_binary_crossentropy": "-", "val_f1_score": "+", "val_root_mean_squared_error": "-",
}  # fmt: skip
PRACTICE = {  # names of scripts, trainers and trackers
    "train_loss": "-", "eval_loss": "-", "eval/loss": "-", "train/loss_epoch": "-", "nll": "-", "test.nll": "-",
    "ppl": "-", "valid_ppl": "-", "bpc": "-", "bits_per_character": "-", "bits-per-byte": "-", "wer": "-", "CER": "-",
    "eval_wer": "-", "mAP": "+", "mAP_50": "+", "map50": "+", "val/mAP50-95": "+", "mIoU": "+", "val_miou": "+",
    "top1": "+", "top5_acc": "+", "acc1": "+", "err1": "-", "rmse": "-", "RMSE": "-", "smape": "-",
    "error_rate": "-", "rouge1": "+", "rougeL": "+", "bleu4": "+", "sacrebleu": "+", "chrf": "+",
    "episode_reward": "+", "mean_return": "+", "win_rate": "+", "success_rate": "+", "fid": "-", "psnr": "+",
    "ssim": "+",
    "lpips": "-", "PSNR_dB": "+", "hits@10": "+", "mrr": "+", "ndcg@10": "+", "eer": "-", "fpr": "-", "tpr": "+",
    "negLogLikelihood": "-", "negative_log_likelihood": "-", "log_likelihood": "+", "cross_entropy": "-", "xent": "-",
    "loss_scale": "?", "lr": "?", "learning_rate": "?", "grad_norm": "?", "epoch": "?", "step": "?", "tokens": "?",
    "reward_scale": "?", "loss_weight": "?", "accuracy_loss": "?", "score_threshold": "?", "temperature": "?",
    "underflow": "-", "skipped": "-", "seconds": "-", "valLoss": "-", "testAccuracy": "+", "ValAcc": "+", "MSE": "-",
    "em": "+", "exact_match": "+", "glue/mcc": "+", "spearmanr": "+", "pearson": "+", "kl": "-", "num_classes": "?",
}  # fmt: skip
ALL = [pair for names in (TORCHMETRICS, SCIKIT_LEARN, KERAS, PRACTICE) for pair in sorted(names.items())]
HELD_OUT = dict(ALL[::3])
KNOWN = {name: truth for name, truth in ALL if name not in HELD_OUT}
