"""Groups of like cases of which `make test` runs one in so many, the first among them; the others
are `slow`. Property tests of that run try a third of their examples. `make test-all` runs every
case and tries every example."""

from __future__ import annotations

import unittest
from collections import Counter
from collections.abc import Iterable, Mapping

import hypothesis
import pytest

EXAMPLES_IN, FEWEST = 3, 10
# By the test's file and function: one case in so many
ONE_IN: Mapping[str, int] = {
    "benchmarks/test_correctness.py::test_the_reference_passes_each_kernels_check": 4,
    "benchmarks/test_engine_figures.py::test_every_shape_is_one_that_the_model_families_know": 3,
    "cache/test_kv.py::test_a_donated_pool_is_updated_in_place_and_never_copied": 2,
    "cache/test_kv.py::test_sinks_follow_their_heads_to_decode_rows_and_chunks": 2,
    "cache/test_transfer.py::test_pages_come_back_as_they_went_and_the_others_stay": 6,
    "demo/test_skills.py::"
    "test_every_call_is_of_an_offered_tool_fits_its_schema_and_is_on_its_side": 2,
    "engine/constraints/test_grammars.py::test_overlap_and_preemption_change_no_token": 2,
    "engine/constraints/test_grammars_forced.py::"
    "test_forced_tokens_are_said_in_fewer_steps_and_are_the_same": 2,
    "engine/runtime/test_compiled_for_h200.py::"
    "test_a_forward_or_a_draw_compiles_and_writes_pages_in_place": 4,
    "engine/runtime/test_compiled_for_h200.py::test_a_pool_that_is_not_donated_is_found": 2,
    "engine/runtime/test_compiled_for_h200.py::"
    "test_what_runs_beside_forwards_compiles_and_keeps_its_buffers": 6,
    "engine/runtime/test_logits_processing.py::"
    "test_tokens_follow_the_definitions_in_a_crowd_of_all_kinds": 2,
    "engine/runtime/test_lowering.py::test_a_step_lowers_for_a_device_that_is_not_here": 2,
    "engine/runtime/test_lowering.py::test_a_step_over_8_bit_pages_lowers": 2,
    "engine/runtime/test_lowering.py::test_a_step_over_two_kinds_of_layers_lowers": 4,
    "engine/runtime/test_lowering.py::test_a_step_with_a_checkpoints_scales_lowers": 2,
    "engine/runtime/test_lowering.py::"
    "test_log_probabilities_lower_for_a_device_that_is_not_here": 3,
    "engine/runtime/test_lowering.py::"
    "test_what_shapes_logits_lowers_for_a_device_that_is_not_here": 3,
    "engine/runtime/test_page_swapper.py::"
    "test_copies_that_fail_only_when_they_are_made_cost_their_pages_alone": 2,
    "engine/runtime/test_page_swapper.py::"
    "test_pages_that_find_no_memory_are_computed_again_and_nobody_dies": 2,
    "engine/runtime/test_page_swapper.py::"
    "test_tokens_are_those_of_a_request_alone_however_it_was_interrupted": 2,
    "engine/scheduling/test_overcommit.py::test_an_overcommitted_pool_is_shared_in_turns": 3,
    "engine/scheduling/test_windows.py::"
    "test_choices_and_beams_are_those_of_an_engine_that_keeps_all_pages": 2,
    "engine/test_enter.py::test_whichever_call_of_entering_fails_nothing_is_left_of_the_request": 4,
    "engine/test_invariants.py::test_a_request_gets_the_same_however_it_is_run": 48,
    "engine/test_invariants.py::test_the_choices_of_a_prompt_are_those_of_requests_of_their_own": 8,
    "engine/test_pooler_config.py::test_every_token_has_a_result_of_which_the_pool_is_made": 3,
    "engine/test_pooling_engine.py::test_vectors_are_those_of_the_reference_together_and_alone": 12,
    "engine/test_sleep.py::test_an_engine_that_wakes_answers_as_before_and_compiles_nothing": 2,
    "engine/test_soak.py::test_hundreds_of_requests_leave_nothing_behind": 3,
    "models/test_dense_families.py::test_norms_of_heads_are_those_of_the_true_width": 3,
    "models/test_goldens.py::test_heads_that_are_stored_wider_change_nothing": 2,
    "models/test_goldens.py::test_parts_of_fused_and_reordered_tensors_go_to_their_shards": 3,
    "models/test_goldens.py::test_sharding_a_checkpoint_changes_nothing": 8,
    "models/test_published_sizes.py::"
    "test_a_published_model_has_the_parameters_that_it_is_known_for": 9,
    "models/test_published_tensors.py::test_no_tensor_is_both_needed_and_left_out": 3,
    "models/test_rules.py::test_every_tensor_is_used_once_and_every_parameter_made_once": 4,
    "models/test_spec.py::test_a_spec_describes_the_model_that_is_built": 3,
    "nn/mixture/test_experts.py::test_a_mixture_is_the_weighted_sum_of_a_tokens_experts": 6,
    "nn/mixture/test_experts_over_devices.py::test_parts_of_devices_add_up_to_the_mixture": 2,
    "nn/mixture/test_gating.py::test_experts_are_what_each_of_them_computes": 4,
    "nn/mixture/test_routers.py::test_only_experts_of_the_best_groups_are_chosen": 2,
    "nn/test_attention.py::test_a_decoder_adds_each_block_to_the_residual_stream": 2,
    "nn/test_attention.py::test_attention_is_its_definition": 20,
    "nn/test_latent.py::test_latent_attention_is_its_definition": 8,
    "nn/test_readers.py::test_a_rounded_norm_gives_the_bits_of_a_plain_one": 2,
    "nn/test_shapes.py::test_names_promise_the_axes_that_arrays_have": 6,
    "pallas_kernels/test_add_norm.py::"
    "test_the_interpreted_kernel_equals_float64_up_to_one_rounding": 2,
    "pallas_kernels/test_add_norm.py::test_the_reference_equals_float64_up_to_one_rounding": 3,
    "pallas_kernels/test_add_norm_places.py::"
    "test_a_rounded_norm_has_the_bits_of_the_norm_rounded_by_itself": 2,
    "pallas_kernels/test_array_axes.py::test_extend_keeps_its_promises": 2,
    "pallas_kernels/test_array_axes.py::test_the_hopper_kernels_keep_their_promises": 2,
    "pallas_kernels/test_array_names.py::test_attention_over_pages": 2,
    "pallas_kernels/test_attention_laws.py::"
    "test_8_bit_pages_mean_their_numbers_times_their_scales": 2,
    "pallas_kernels/test_attention_laws.py::test_a_window_wider_than_every_row_changes_nothing": 2,
    "pallas_kernels/test_behind_windows.py::"
    "test_no_kernel_lets_through_what_lies_behind_a_window_by_a_tile": 4,
    "pallas_kernels/test_decode_plans.py::test_the_plan_is_the_same_inside_and_outside_of_a_jit": 2,
    "pallas_kernels/test_draw.py::test_a_row_draws_what_its_options_allow": 6,
    "pallas_kernels/test_draw.py::"
    "test_a_row_without_a_finite_maximum_is_reported_and_disturbs_nobody": 2,
    "pallas_kernels/test_draw.py::test_every_banned_token_is_impossible": 2,
    "pallas_kernels/test_draw.py::test_of_equal_logits_greedy_takes_the_first": 2,
    "pallas_kernels/test_draw.py::"
    "test_the_search_finds_a_threshold_that_exactly_k_reach_or_the_kth_among_equals": 4,
    "pallas_kernels/test_extend_plans.py::"
    "test_the_back_ends_plan_covers_all_tokens_with_units_of_all_heads": 6,
    "pallas_kernels/test_first_page.py::test_back_ends_in_plain_jax": 4,
    "pallas_kernels/test_first_page.py::test_writes": 2,
    "pallas_kernels/test_gated_matmul_places.py::test_the_product_equals_float64": 2,
    "pallas_kernels/test_given_scales.py::test_it_lowers_for_cuda_and_aliases_the_pools": 3,
    "pallas_kernels/test_given_scales.py::test_the_interpreted_write_for_hopper_does_so_too": 8,
    "pallas_kernels/test_given_scales.py::test_the_reference_writes_by_the_given_scales": 8,
    "pallas_kernels/test_grouped_matmul.py::test_a_routed_feed_forward_equals_float64": 8,
    "pallas_kernels/test_grouped_matmul.py::"
    "test_devices_that_share_the_experts_add_up_to_all_of_them": 3,
    "pallas_kernels/test_grouped_matmul_places.py::"
    "test_a_feed_forward_equals_float64_and_reads_nothing_else": 2,
    "pallas_kernels/test_int4_matmul.py::test_the_product_equals_float64": 2,
    "pallas_kernels/test_int4_matmul.py::test_the_reference_equals_float64": 8,
    "pallas_kernels/test_items.py::test_chunks_are_cut_into_the_items_of_their_rows": 2,
    "pallas_kernels/test_latent_decode.py::test_the_reference_gives_what_the_definition_says": 6,
    "pallas_kernels/test_latent_extend.py::test_chunks_attend_as_if_latents_were_expanded": 12,
    "pallas_kernels/test_latent_laws.py::test_absorbed_tokens_come_in_slabs": 2,
    "pallas_kernels/test_latent_laws.py::test_blocks_are_shared_among_tiles_of_heads": 2,
    "pallas_kernels/test_latent_laws.py::test_projections_keep_the_type": 3,
    "pallas_kernels/test_mosaic_decode.py::"
    "test_every_tile_belongs_to_one_split_and_every_follower_has_one_owner": 3,
    "pallas_kernels/test_mosaic_decode.py::test_the_kernel_lowers_for_cuda": 4,
    "pallas_kernels/test_mosaic_decode_narrow.py::test_the_kernel_lowers_for_cuda": 2,
    "pallas_kernels/test_mosaic_extend.py::test_a_plan_without_splits_cuts_no_unit": 16,
    "pallas_kernels/test_mosaic_extend.py::test_every_tile_of_every_token_is_worked_on_once": 24,
    "pallas_kernels/test_mosaic_extend.py::test_the_interpreted_kernel_equals_the_reference": 3,
    "pallas_kernels/test_mosaic_extend.py::test_the_kernel_lowers_for_cuda": 4,
    "pallas_kernels/test_mosaic_extend_narrow.py::test_the_kernel_lowers_for_cuda": 4,
    "pallas_kernels/test_mosaic_extend_narrow.py::"
    "test_widened_tiles_are_what_8_bits_stand_for_and_zeros_where_nothing_is_seen": 6,
    "pallas_kernels/test_mosaic_gated_matmul.py::"
    "test_the_interpreted_kernel_equals_the_product_in_float64": 12,
    "pallas_kernels/test_mosaic_gated_matmul.py::test_the_kernel_lowers_for_cuda": 2,
    "pallas_kernels/test_mosaic_tpu.py::"
    "test_the_interpreted_kernel_gives_what_the_definition_says": 4,
    "pallas_kernels/test_page_edges.py::test_a_chunk_that_ends_at_every_edge_sees_its_windows": 3,
    "pallas_kernels/test_page_edges.py::test_a_decode_at_every_edge_sees_its_window": 2,
    "pallas_kernels/test_page_edges.py::"
    "test_a_prompt_in_chunks_of_any_cut_is_the_prompt_at_once": 2,
    "pallas_kernels/test_page_edges.py::"
    "test_rows_that_are_not_in_use_give_zeros_over_pages_of_nan": 2,
    "pallas_kernels/test_paged_decode.py::"
    "test_a_row_alone_equals_the_row_in_a_batch_to_the_last_bit": 4,
    "pallas_kernels/test_paged_decode.py::test_narrow_types_lose_only_their_own_rounding": 2,
    "pallas_kernels/test_paged_decode.py::test_the_reference_gives_what_the_definition_says": 8,
    "pallas_kernels/test_paged_extend.py::test_the_reference_gives_what_the_definition_says": 16,
    "pallas_kernels/test_plan_flags.py::test_a_call_changes_none_of_its_inputs": 2,
    "pallas_kernels/test_plan_flags.py::test_calls_with_one_open_plan_hand_its_buffer_on": 4,
    "pallas_kernels/test_plan_flags.py::"
    "test_the_lowered_call_aliases_the_buffer_of_flags_and_nothing_else": 4,
    "pallas_kernels/test_plan_laws.py::test_an_extend_plan_has_the_items_that_plain_python_cuts": 2,
    "pallas_kernels/test_quantised.py::test_a_write_stores_the_token_in_8_bits_and_its_scale": 8,
    "pallas_kernels/test_quantised.py::"
    "test_reference_and_fallback_read_what_8_bits_stand_for_the_first_to_the_last_bit": 8,
    "pallas_kernels/test_quantised.py::"
    "test_the_interpreted_write_for_hopper_rounds_as_the_reference": 3,
    "pallas_kernels/test_rope_write.py::"
    "test_the_interpreted_kernel_equals_the_reference_up_to_rounding": 16,
    "pallas_kernels/test_rope_write.py::test_the_kernel_lowers_for_cuda_and_aliases_the_pools": 3,
    "pallas_kernels/test_rope_write_places.py::test_the_kernel_writes_what_the_reference_writes": 2,
    "pallas_kernels/test_route.py::test_the_assembly_routes_as_the_reference": 6,
    "pallas_kernels/test_route.py::test_the_kernel_routes_as_the_reference": 2,
    "pallas_kernels/test_scaled_matmul.py::test_products_are_those_of_the_definition": 3,
    "pallas_kernels/test_gating_rows.py::test_rows_are_gated_and_rounded_once_more": 2,
    "pallas_kernels/test_scaled_matmul_places.py::test_rounded_rows_are_those_of_the_definition": 2,
    "pallas_kernels/test_scaled_matmul_places.py::test_the_product_is_that_of_the_definition": 2,
    "pallas_kernels/test_segment_attention.py::"
    "test_a_plan_meets_every_key_that_is_seen_and_masks_where_one_is_not": 8,
    "pallas_kernels/test_segment_attention.py::test_the_hopper_kernel_lowers_for_cuda": 2,
    "pallas_kernels/test_segment_attention.py::"
    "test_tokens_see_their_own_segment_within_the_window": 8,
    "pallas_kernels/test_tiles.py::"
    "test_any_mask_gives_the_softmax_over_the_keys_that_a_query_sees": 2,
    "pallas_kernels/test_xla_attention.py::test_every_shared_case_passes": 12,
    "pallas_kernels/test_xla_attention.py::test_many_small_tiles_give_the_same": 2,
    "pallas_kernels/test_xla_attention.py::test_narrow_types_lose_only_their_own_rounding": 3,
    "sampling/test_logprobs.py::test_log_probabilities_and_ranks_are_exact": 2,
    "sampling/test_logprobs.py::test_the_largest_are_those_of_a_stable_sort": 3,
    "sampling/test_process_distribution.py::test_draws_follow_the_exact_distribution": 3,
    "sampling/test_sample.py::test_a_draw_depends_on_its_own_row_alone": 2,
    "sampling/test_sample.py::"
    "test_temperature_zero_takes_the_most_likely_token_whatever_the_filters": 2,
    "sampling/test_split_vocabulary.py::test_tokens_are_those_of_one_device": 6,
    "server/requests/test_choices.py::"
    "test_a_beam_search_reaches_the_engine_without_the_models_defaults_for_draws": 3,
    "server/openai/test_streams.py::test_no_character_of_a_text_ends_a_line_of_a_stream": 3,
    "server/page/test_accessibility.py::test_names_contrast_sizes_and_width": 4,
    "server/parsing/test_laws.py::test_time_is_linear_in_the_length_of_the_output": 4,
    "server/test_lifecycle.py::"
    "test_a_fault_of_config_json_is_named_before_the_tokenizer_is_read": 3,
    "server/test_lifecycle.py::test_a_tokenizer_that_cannot_serve_ends_the_start_in_one_line": 2,
    "server/test_lifecycle.py::test_what_cannot_work_is_said_in_one_line_before_any_loading": 2,
    "server/test_operations.py::test_probes_ask_routes_that_answer": 2,
    "server/test_stuck_start.py::"
    "test_a_signal_ends_a_start_that_is_stuck_in_the_tokenizers_library": 4,
    "weights/test_held.py::test_8_bit_floats_compute_what_their_values_do": 2,
    "weights/test_held_experts.py::"
    "test_a_kernel_takes_all_experts_at_once_by_the_sizes_on_a_device": 3,
    "weights/test_held_experts.py::"
    "test_the_kernel_of_all_experts_gives_what_tiles_one_by_one_do": 2,
    "weights/test_held_int4.py::test_numbers_of_words_compute_what_their_values_do": 2,
    "weights/test_kept.py::test_an_entry_that_is_not_whole_is_made_anew": 2,
    "weights/test_load.py::test_abstract_describes_exactly_what_is_loaded": 2,
    "weights/test_load.py::test_every_checkpoint_has_fitting_sizes": 8,
    "weights/test_packed.py::test_8_bit_blocks_give_the_parameters_of_their_values": 3,
    "weights/test_rounding.py::test_rounded_weights_compute_what_their_values_do": 2,
}


def thin(items: Iterable[pytest.Item]) -> None:
    """Mark the other cases of these groups `slow`, in the order in which they were collected."""
    seen: Counter[str] = Counter()
    for item in items:
        group = item.nodeid.removeprefix("tests/").partition("[")[0]
        if group in ONE_IN and item.get_closest_marker("slow") is None:
            if seen[group] % ONE_IN[group]:
                item.add_marker(pytest.mark.slow)
            seen[group] += 1


def try_fewer(items: Iterable[pytest.Item]) -> None:
    """Property tests of more than `FEWEST` examples try one in `EXAMPLES_IN`, at least `FEWEST`."""
    seen: set[object] = set()
    for item in items:
        # A state machine's settings are its class's
        holder, name = (
            (item.cls, "settings")
            if issubclass(getattr(item, "cls", None) or object, unittest.TestCase)
            else (getattr(item, "function", None), "_hypothesis_internal_use_settings")
        )
        given = getattr(holder, name, None)
        if isinstance(given, hypothesis.settings) and holder not in seen:
            seen.add(holder)
            number = max(min(FEWEST, given.max_examples), given.max_examples // EXAMPLES_IN)
            setattr(holder, name, hypothesis.settings(given, max_examples=number))
