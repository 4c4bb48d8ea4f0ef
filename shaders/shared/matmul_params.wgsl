// What every kernel of `matmul` is told; mirrors `Params` of kernels/matmul.rs.

struct Params {
  n: u32,             // rows of w in this slice
  groups: u32,        // of 32, along k
  x_stride: u32,      // elements from row to row of x
  y_stride: u32,      // elements from row to row of y
  y_offset: u32,
  counts_logits: u32, // 1: x has a row per logit row; 0: per token
  accumulate: u32,    // 1: adds to y
  has_bias: u32,
  // GROUPED: weights of experts one after the other, each padded to whole blocks of 64 rows.
  expert_rows: u32,   // padded rows of an expert
  first_row: u32,     // of this slice, counted over experts
  num_rows: u32,      // of this slice
  slots: u32,         // where the pairs begin in work
  pairs_per_row: u32, // pairs that share a row of x
  squares_at: u32,    // NORMED: first sum of squares in xs
  norm_k: u32,        // NORMED: elements of a row, without padding
  eps: f32,           // NORMED
  to_squares_at: u32, // TO_HIDDEN: first sum of squares in ys
  added_stride: u32,  // ADDED: elements from row to row, and where the slice's begin
  added_offset: u32,
}
