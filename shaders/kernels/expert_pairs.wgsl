// Pairs of (token, expert) sorted by expert and cut into tiles of at most `columns` pairs of one expert: the work of the
// products with expert weights. One workgroup; lane l counts the pairs of experts l, l + 64, …
// Not one subgroup in any class: the counts of all experts must meet.
// Grid: 1 workgroup.
#import step

struct Params {
  num_experts: u32,
  num_active: u32,
  columns: u32,
  slots: u32, // where the pairs begin
}

@group(0) @binding(0) var<storage, read> step_meta: array<u32>;
@group(0) @binding(1) var<storage, read> chosen: array<u32>; // [num_tokens, num_active]
// (number of tiles, 0, 0, 0), tiles of (expert, first slot, pairs, 0); from `slots` on the pair of each slot
@group(0) @binding(2) var<storage, read_write> work: array<u32>;
@group(0) @binding(3) var<uniform> params: Params;

var<workgroup> counts: array<u32, ${MAX_EXPERTS}>;

@compute @workgroup_size(64)
fn main(@builtin(local_invocation_index) lane: u32) {
  let num_pairs = num_tokens() * params.num_active;
  for (var expert = lane; expert < params.num_experts; expert += 64u) {
    var count = 0u;
    for (var pair = 0u; pair < num_pairs; pair++) {
      count += select(0u, 1u, chosen[pair] == expert);
    }
    counts[expert] = count;
  }
  workgroupBarrier();
  for (var expert = lane; expert < params.num_experts; expert += 64u) {
    var slot = 0u;
    var tile = 0u;
    for (var other = 0u; other < expert; other++) {
      slot += counts[other];
      tile += (counts[other] + params.columns - 1u) / params.columns;
    }
    let end = slot + counts[expert];
    for (var first = slot; first < end; first += params.columns) {
      work[4u + tile * 4u] = expert;
      work[5u + tile * 4u] = first;
      work[6u + tile * 4u] = min(params.columns, end - first);
      tile++;
    }
    if expert + 1u == params.num_experts {
      work[0] = tile;
    }
    for (var pair = 0u; pair < num_pairs && slot < end; pair++) {
      if chosen[pair] == expert {
        work[params.slots + slot] = pair;
        slot++;
      }
    }
  }
}
