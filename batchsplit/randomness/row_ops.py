"""Operations of torch sorted by what they do to the order of the rows; in none of these lists: the order is lost."""

VIEWS = {"view", "_unsafe_view", "_reshape_alias", "reshape", "_reshape_copy", "view_copy", "unflatten"}
STRIDED = {
    "permute", "transpose", "t", "expand", "squeeze", "unsqueeze", "select", "slice", "unbind", "split",
    "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "chunk", "narrow", "alias", "detach", "diagonal",
    "unfold", "numpy_T", "unsafe_chunk", "movedim", "lift_fresh", "transpose_",
    "unsqueeze_", "squeeze_", "t_", "detach_",
}  # fmt: skip
FRESH = {
    "empty", "zeros", "ones", "full", "arange", "linspace", "eye", "scalar_tensor", "tril_indices", "triu_indices",
    "empty_strided", "empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones",
    "new_full", "new_empty_strided", "rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "randperm",
    "empty_permuted", "hann_window", "lift",
}  # fmt: skip
# Rows stay where they are: entry i of the batch axis of what comes out is entry i of the batch axis of what goes in.
IN_ORDER = {
    "mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "convolution", "_convolution", "conv2d",
    "mkldnn_convolution", "mkldnn_rnn_layer", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "_cudnn_rnn",
    "miopen_rnn", "native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit",
    "_native_batch_norm_legit_no_training", "_batch_norm_with_update", "cudnn_batch_norm", "miopen_batch_norm",
    "_fused_rms_norm", "_softmax", "_log_softmax", "_safe_softmax", "embedding", "sum", "mean", "prod", "amax", "amin",
    "aminmax", "max", "min", "argmax", "argmin", "var", "std", "var_mean", "std_mean", "norm", "linalg_vector_norm",
    "logsumexp", "any", "all", "nansum", "median", "nanmedian", "cumsum", "cumprod", "logcumsumexp", "cummax", "cummin",
    "count_nonzero", "_euclidean_dist", "_cdist_forward", "native_dropout", "_fused_dropout", "one_hot",
    "max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool2d", "avg_pool3d", "avg_pool1d", "max_pool2d",
    "adaptive_max_pool2d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool3d", "pixel_shuffle",
    "pixel_unshuffle", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_bilinear2d",
    "upsample_bicubic2d", "upsample_linear1d", "upsample_trilinear3d", "_upsample_bilinear2d_aa", "im2col", "col2im",
    "grid_sampler_2d", "grid_sampler_3d", "affine_grid_generator", "constant_pad_nd", "reflection_pad1d",
    "reflection_pad2d", "replication_pad1d", "replication_pad2d", "nll_loss_forward", "nll_loss2d_forward", "cross",
    "linalg_cross", "mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "glu", "tril", "triu",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu", "clone", "contiguous",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention", "_to_copy", "copy", "copy_",
    "_scaled_dot_product_fused_attention_overrideable", "multi_margin_loss", "_fft_r2c", "_fft_c2c", "_fft_c2r",
    "_weight_norm_interface", "masked_fill", "masked_fill_", "where", "bucketize", "searchsorted", "isin", "linear",
    "multinomial", "_pdist_forward", "_linalg_det", "linalg_inv_ex", "_trilinear", "fill", "fill_", "zero_", "relu_",
    "_local_scalar_dense", "is_nonzero", "equal", "_assert_async", "_assert_scalar", "_is_all_true", "_has_nan",
    "_mkldnn_reshape", "mkldnn_linear", "prelu", "rrelu_with_noise", "logit", "normal", "_sparse_softmax",
    "_efficient_attention_forward", "_flash_attention_forward", "renorm", "dist", "kl_div", "_masked_softmax",
    "_fused_moving_avg_obs_fq_helper", "square_", "ctc_loss", "_ctc_loss", "trace", "linalg_norm", "_int_mm",
}  # fmt: skip
ALONG = {"flip", "roll", "sort", "argsort", "topk", "kthvalue", "mode", "rot90"}
INDEXED = {
    "index_select", "gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_",
    "index_add", "index_add_", "index_copy", "index_copy_", "index_fill", "index_fill_",
}  # fmt: skip
