//! The ways to compute attention that give the same bits, and what each class begins with.
//!
//! Guarantees: whatever is chosen, a query's partial over 256 keys runs over the same tiles of keys, with keys and dims
//! ascending: only who computes which heads, tokens and dims, and how many queries share a load, differs. Keys of a tile, and
//! with them those of a lane, are no choice: the maximum of each tile scales what came before it.

use super::attention::{Shape, Variant};
use super::kv_layout::padded_head_dim;
use super::{Class, GROUP};

/// One way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Way {
    /// Query heads of a workgroup, all of one kv head.
    pub heads: u32,
    /// Tokens of a workgroup.
    pub tokens: u32,
    /// Dims of the output that a lane holds: 4 or 8.
    pub dims: u32,
}

impl std::fmt::Display for Way {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "H{} T{} D{}", self.heads, self.tokens, self.dims)
    }
}

/// What a choice is made for: one kernel of a model's attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionKey {
    pub shape: Shape,
    /// Of one token's items, or of several tokens'.
    pub variant: Variant,
    /// The output is signed bytes.
    pub is_quantised: bool,
}

impl std::fmt::Display for AttentionKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Shape { num_heads, num_kv_heads, head_dim, kv, softcap, has_sinks } = self.shape;
        write!(f, "attention {kv:?} {num_heads}/{num_kv_heads} heads of {head_dim} {:?}", self.variant)?;
        let words = [(softcap.is_some(), " softcap"), (has_sinks, " sinks"), (self.is_quantised, " i8")];
        words.iter().filter(|(is_on, _)| *is_on).try_for_each(|(_, word)| f.write_str(word))
    }
}

/// Queries that share a workgroup when rows are long, times the dims of each that a lane holds: few enough for the
/// kernel to compile in about a second on a software adapter.
const DIMS_PER_LANE: u32 = 64;
/// The same for a way that is tried.
const MOST_DIMS_PER_LANE: u32 = 128;
const MOST_HEADS: u32 = 8;
const MOST_TOKENS: u32 = 8;

impl AttentionKey {
    /// What the class begins with.
    pub fn prior(&self, class: Class) -> Way {
        let heads = self.divisors().last().expect("1 divides every group");
        let dims = match class {
            Class::Subgroup(lanes) if lanes <= 8 => 8,
            _ => 4,
        };
        let tokens = match self.variant {
            Variant::Several => (DIMS_PER_LANE / self.dims_held(class, 8) / heads).clamp(1, MOST_TOKENS),
            Variant::Single | Variant::Merge => 1,
        };
        Way { heads, tokens, dims }
    }

    /// The ways worth trying, [`AttentionKey::prior`] first. Merging is not tried.
    pub fn candidates(&self, class: Class) -> Vec<Way> {
        let prior = self.prior(class);
        let divisors: Vec<u32> = self.divisors().collect();
        let fewer = divisors.iter().rev().find(|heads| **heads < prior.heads).copied().unwrap_or(0);
        let others = [
            Way { heads: fewer, ..prior },
            Way { heads: 1, ..prior },
            Way { heads: fewer, tokens: prior.tokens * 2, ..prior },
            Way { tokens: prior.tokens * 2, ..prior },
            Way { tokens: prior.tokens / 2, ..prior },
            Way { dims: 12 - prior.dims, ..prior },
        ];
        let mut found = vec![prior];
        for way in others {
            if self.is_sound(way, class) && !found.contains(&way) {
                found.push(way);
            }
        }
        found
    }

    /// Numbers of heads that a workgroup can have, ascending. Wide rows leave no registers for many.
    fn divisors(&self) -> impl Iterator<Item = u32> {
        let group = self.shape.num_heads / self.shape.num_kv_heads;
        let most = if self.shape.head_dim > 256 { 1 } else { MOST_HEADS };
        (1..=most).filter(move |heads| group.is_multiple_of(*heads))
    }

    /// Dims of a query that a lane holds, in steps of so many.
    fn dims_held(&self, class: Class, step: u32) -> u32 {
        match class {
            Class::Subgroup(lanes) => padded_head_dim(self.shape.head_dim).div_ceil(lanes).next_multiple_of(step),
            Class::Floor => 8,
        }
    }

    /// The kernels take it.
    fn is_sound(&self, way: Way, class: Class) -> bool {
        let tokens_fit = match self.variant {
            // Items of one token are another list.
            Variant::Several => (2..=MOST_TOKENS).contains(&way.tokens),
            Variant::Single => way.tokens == 1,
            Variant::Merge => false,
        };
        let dims_fit = match class {
            // A group of 32 that is quantised lies in as many lanes as there are.
            Class::Subgroup(lanes) => [4, 8].contains(&way.dims) && (!self.is_quantised || GROUP / way.dims <= lanes),
            Class::Floor => way.dims == 4,
        };
        let held = way.heads * way.tokens * self.dims_held(class, way.dims);
        tokens_fit && dims_fit && self.divisors().any(|heads| heads == way.heads) && held <= MOST_DIMS_PER_LANE
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::kv_layout::KvFormat;
    use crate::kernels::variants::{CLASSES, HEADS};

    fn key(heads: (u32, u32, u32), variant: Variant, is_quantised: bool) -> AttentionKey {
        let (num_heads, num_kv_heads, head_dim) = heads;
        let shape = Shape { num_heads, num_kv_heads, head_dim, kv: KvFormat::F16, softcap: None, has_sinks: false };
        AttentionKey { shape, variant, is_quantised }
    }

    #[test]
    fn classes_begin_with_whole_divisors_of_a_group_and_few_accumulators() {
        let check = |heads, kv_heads, head_dim, (want_heads, want_tokens)| {
            let prior = |variant| key((heads, kv_heads, head_dim), variant, false).prior(Class::Subgroup(8));
            assert_eq!(prior(Variant::Several), Way { heads: want_heads, tokens: want_tokens, dims: 8 });
            assert_eq!(prior(Variant::Single), Way { heads: want_heads, tokens: 1, dims: 8 });
        };
        check(9, 3, 64, (3, 2));
        check(8, 8, 64, (1, 8));
        check(14, 2, 64, (7, 1));
        check(32, 8, 128, (4, 1));
        check(32, 32, 256, (1, 2));
        check(32, 2, 64, (8, 1));
        check(11, 1, 64, (1, 8));
    }

    #[test]
    fn candidates_begin_with_the_prior_differ_and_are_what_the_kernels_take() {
        let mut most = 0;
        for class in CLASSES {
            for heads in HEADS {
                for (variant, is_quantised) in
                    [(Variant::Single, false), (Variant::Several, false), (Variant::Single, true)]
                {
                    let key = key(heads, variant, is_quantised);
                    if is_quantised && !key.shape.can_quantise(class) {
                        continue;
                    }
                    let found = key.candidates(class);
                    assert_eq!(found[0], key.prior(class), "{key}");
                    for (i, way) in found.iter().enumerate().skip(1) {
                        assert!(!found[..i].contains(way), "{key}: {way} twice");
                        assert!((heads.0 / heads.1).is_multiple_of(way.heads), "{key}: {way}");
                        assert_eq!(way.tokens > 1, variant == Variant::Several, "{key}: {way}");
                        assert!(!is_quantised || class.lanes() * way.dims >= 32, "{key}: {way}");
                    }
                    most = most.max(found.len());
                }
            }
            assert_eq!(key((9, 3, 64), Variant::Merge, false).candidates(class).len(), 1, "merging is not tried");
        }
        assert!((4..=7).contains(&most), "{most}");
    }
}
