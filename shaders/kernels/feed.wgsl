// Tokens of a step that the last step drew and nobody has read yet: token t gets what logit row feed_source(t) drew. Without
// such tokens it does nothing.
// Grid: ceil(num_tokens / 64) workgroups.
#import grid
#import step

@group(0) @binding(0) var<storage, read> sampled: array<vec2<u32>>; // [num_logits] of the last step: (token, flag)
@group(0) @binding(1) var<storage, read_write> step_meta: array<u32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let token = linear_workgroup(group) * 64u + lane;
  if !has_feed() || token >= num_tokens() {
    return;
  }
  step_meta[token_ids_word() + token] = sampled[feed_source(token)].x;
}
