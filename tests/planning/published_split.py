"""Which rows of the published tables constants are fitted on: chosen by the shape of the model, before any error was looked at.

Rows of all other shapes are for testing; they never enter a fit. The rule: every second size of a table, so that tests interpolate and
extrapolate; where a table has few shapes, the smaller ones. Tables that are not named here are for testing only.
"""

# table -> names of the models whose rows are fitted
FITTED_MODELS = {
    "vtrain_multi_a100": ("GPT-3.6B", "GPT-39.1B"),
    "vtrain_single_a100": ("GPT-0.2B", "GPT-0.3B", "GPT-0.91B", "GPT-1.31B"),
    "mosaic_llm_foundry": ("MPT-1b", "MPT-30b", "MPT-350m", "MPT-7b"),
    "korthikanti2022_a100": ("GPT-22B", "GPT-530B"),
    "megatron_sc21_a100": ("GPT-1.7B", "GPT-145.6B", "GPT-39.1B", "GPT-529.6B", "GPT-7.5B"),
    "torchtitan": ("Llama-3.1-8B",),
    "simumax_b200": ("deepseekv2-L4", "llama3_70b-L12"),
    "nemo_megatron_bridge": ("Llama-3-70B", "Llama-3-8B", "Qwen3-30B-A3B"),
    "nemo_automodel_h100": ("Qwen3-30B-A3B",),
}

# table -> numbers of the rows: "table:number" is the row_id
FITTED_ROWS = {
    "vtrain_multi_a100": (
        3, 4, 5, 8, 9, 11, 12, 15, 16, 18, 22, 23, 25, 26, 43, 45, 46, 48, 51, 53, 54, 56, 58, 62, 64, 66, 68, 69, 70, 71, 73, 74, 76,
        79, 83, 85,
    ),
    "vtrain_single_a100": (
        11, 12, 24, 53, 55, 61, 68, 74, 88, 104, 118, 132, 141, 159, 201, 203, 208, 280, 287, 302, 320, 321, 343, 347, 356, 363, 386,
        393, 416, 437, 444, 446, 453, 480, 481, 482, 486, 499, 503, 523, 607, 621, 632, 672, 675, 676, 678, 680, 681, 683, 689, 702,
        715, 719, 768, 777, 802, 807, 812, 818, 867, 875, 925, 932, 973, 980, 982, 1004, 1019, 1029, 1042, 1059, 1062, 1084, 1098,
        1106, 1116, 1117, 1130, 1137, 1162, 1197, 1201, 1205, 1235, 1237, 1248, 1263, 1266, 1317, 1348, 1365, 1404, 1413, 1424, 1435,
        1439,
    ),
    "mosaic_llm_foundry": (
        4, 5, 6, 10, 11, 17, 18, 23, 24, 25, 37, 40, 51, 53, 55, 57, 75, 81, 82, 83, 84, 91, 95, 96, 97, 108, 110, 113, 122, 124, 125,
        126, 152, 153, 154, 157, 158, 159, 173, 174, 175, 177, 178, 180, 181, 182, 195, 196, 198, 200, 201, 203, 204,
    ),
    "korthikanti2022_a100": (1, 2, 5, 6),
    "megatron_sc21_a100": (1, 3, 5, 7, 9),
    "torchtitan": (4, 8, 9, 25, 26, 27, 30, 31),
    "simumax_b200": (2, 4, 9, 10, 11, 13, 14, 20, 22, 37, 38, 41, 42),
    "nemo_megatron_bridge": (
        23, 24, 50, 64, 67, 74, 75, 77, 80, 97, 98, 99, 101, 121, 122, 124, 126, 143, 147, 169, 170, 190, 191, 202, 205, 206, 207,
        226, 235, 240, 242, 250, 256, 263, 268, 271, 273,
    ),
    "nemo_automodel_h100": (6,),
}  # fmt: skip
