"""Tests that take about ten seconds or more on two cores; `make test-long` runs them.

With them `make test` would take a quarter of an hour. Distributed training, the examples, the code
of the pages, plan quality and graphs on the meta device are looked at here only. A line is the
beginning of a test's name.
"""

from __future__ import annotations

LONG = (
    "test_bounds.py::test_bound_is_sharp_on_a_transformer[0.25]",
    "test_bounds.py::test_the_boundary_program_that_presolve_went_round_in_ends",
    "test_chain.py::test_within_budget_and_above_the_bound",
    "test_command_line.py::test_completion_of_the_shell",
    "test_command_line.py::test_from_the_start_of_the_interpreter",
    "test_compare.py::test_a_model_without_blocks_is_reported_and_the_rest_goes_on",
    "test_compare.py::test_an_unknown_variant_is_reported",
    "test_cost_cache.py::test_processes_that_write_at_once_lose_nothing",
    "test_costs.py::test_calls_are_timed_with_room_for_their_results",
    "test_distributed.py",
    "test_docs.py::test_code_in_pages_runs[docs/",
    "test_examples.py",
    "test_fidelity.py::test_predicted_peaks_are_within_the_limits[half-allocated]",
    "test_fidelity.py::test_predicted_peaks_are_within_the_limits[small-dropped]",
    "test_grid.py::test_grid[eager-lstm",
    "test_grid.py::test_grid[inductor-",
    "test_imports.py::test_a_folder_that_is_no_package_is_not_in_the_way",
    "test_inductor.py::test_a_plan_file_knows_its_backend",
    "test_inductor.py::test_dropout_replays_the_mask_of_eager_mode",
    "test_inductor.py::test_few_slices",
    "test_inductor.py::test_lowering_under_autocast",
    "test_inductor.py::test_saved_set_and_peak_survive_lowering",
    "test_inductor.py::test_unrelated_loops_do_not_wait_for_each_other",
    "test_measure.py::test_the_profiler_and_the_process_agree_on_bert",
    "test_meta_graphs.py",
    "test_pieces.py::test_one_budget_for_all_pieces",
    "test_plan_quality.py",
    "test_report_page.py::test_a_model_of_a_hundred_layers",
    "test_shapes.py::test_a_range_planned_ahead_needs_one_capture",
    "test_shapes.py::test_larger_sizes_are_planned_within_the_budget",
    "test_solvers.py::test_a_transformer_at_many_budgets",
    "test_solvers.py::test_combined_solvers_beat_the_baselines",
    "test_solvers.py::test_every_process_finds_the_same_plan",
    "test_solvers.py::test_larger_ones_against_the_oracle",
    "test_solvers.py::test_oracle_refuses_large_graphs",
    "test_solvers.py::test_other_names_give_the_same_order",
    "test_solvers.py::test_twelve_forward_operations_against_the_oracle",
    "test_trainers.py::test_accelerate[bf16]",
    "test_trainers.py::test_hugging_face[callback]",
    "test_training.py::test_another_shape_is_planned_within_the_budget[edit]",
    "test_training.py::test_another_shape_is_planned_within_the_budget[frontier]",
    "test_training.py::test_bitwise_and_within_budget[llama]",
    "test_training.py::test_bitwise_and_within_budget[resnet]",
    "test_training.py::test_bitwise_and_within_budget[t5]",
    "test_training.py::test_bitwise_and_within_budget[unet]",
    "test_training.py::test_bitwise_and_within_budget[vit]",
    "test_training.py::test_dropout_replays_the_same_mask[gpt2]",
    "test_verify.py::test_recurrent_layers_are_one_graph",
)
