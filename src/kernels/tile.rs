//! The ways to compute a product that give the same bits, and which one each product, and each kernel of attention, takes.
//!
//! Guarantees: whatever is chosen, an output is one f32 accumulator over k ascending, in the same precision: only who
//! computes which rows and tokens, and how many loads are shared, differs. The first candidate of a product is what its
//! class begins with, and needs no measurement.

use std::collections::BTreeMap;

use super::attention::Variant;
use super::attention_way::{AttentionKey, Way};
use super::matmul::{self, Ends, Fusion, Precision};
use super::pack::{BLOCK_ROWS, Format};
use super::{Class, GROUP, stride};

/// One way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tile {
    /// Tokens of a workgroup, a power of two.
    pub columns: u32,
    /// Rows of weights of a lane.
    pub rows: u32,
    /// Groups of 32 that share a pass over k.
    pub groups: u32,
    /// Two 4-bit weights are multiplied at once.
    pub pairs: bool,
}

impl std::fmt::Display for Tile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "C{} R{} U{}", self.columns, self.rows, self.groups)?;
        if self.pairs { f.write_str(" pairs") } else { Ok(()) }
    }
}

/// A product for some number of tokens: what a choice is made for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProductKey {
    /// Of the weights.
    pub format: Format,
    pub precision: Precision,
    pub n: u32,
    pub k: u32,
    pub fusion: Fusion,
    /// Most tokens that it is used for, one of [`matmul::COLUMNS`]; the last stands for any number above.
    pub tokens: u32,
}

impl std::fmt::Display for ProductKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ProductKey { format, precision, n, k, fusion, tokens } = self;
        let normed = if fusion.is_normed { " normed" } else { "" };
        write!(f, "{} {precision:?} {n}x{k}{normed} {:?} tokens {tokens}", format.dtype, fusion.ends)
    }
}

impl ProductKey {
    /// Its text without the shape: what holds for a type of weights whatever their number.
    pub fn general(&self) -> String {
        let ProductKey { format, precision, fusion, tokens, .. } = self;
        format!("{} {precision:?} {:?} tokens {tokens}", format.dtype, fusion.ends)
    }
}

/// Most ways that are tried.
const MAX_CANDIDATES: usize = 7;

impl ProductKey {
    /// What the class begins with.
    pub fn prior(&self, class: Class, pairs: bool) -> Tile {
        matmul::prior(
            (self.format, stride(self.k) / GROUP),
            self.precision,
            class,
            pairs,
            (self.tokens, self.fusion.ends),
        )
    }

    /// The ways worth trying, [`ProductKey::prior`] first.
    pub fn candidates(&self, class: Class, pairs: bool) -> Vec<Tile> {
        let prior = self.prior(class, pairs);
        let wider = if class.lanes() >= 16 { prior.columns * 2 } else { 0 };
        let others = [
            Tile { rows: prior.rows / 2, ..prior },
            Tile { rows: prior.rows * 2, ..prior },
            Tile { groups: if prior.groups == 1 { 2 } else { 1 }, ..prior },
            Tile { pairs: !prior.pairs, ..prior },
            Tile { columns: prior.columns / 2, ..prior },
            Tile { columns: if self.tokens == 8 { wider } else { 0 }, ..prior },
        ];
        let mut found = vec![prior];
        found.extend(others.into_iter().filter(|tile| self.is_sound(*tile, class)));
        debug_assert!(found.len() <= MAX_CANDIDATES);
        found
    }

    /// The kernels take it.
    fn is_sound(&self, tile: Tile, class: Class) -> bool {
        let rows = tile.rows * class.lanes();
        let fits = match self.fusion.ends {
            // Gate and up of a group of 32, neither more nor less. What LoRA adds to them is not tried.
            Ends::Gated(_) => rows == BLOCK_ROWS,
            Ends::Adapted(_) => false,
            // Whole groups of 32.
            Ends::Hidden => rows > 0 && rows.is_multiple_of(GROUP) && rows <= BLOCK_ROWS,
            Ends::Sums => tile.rows > 0 && rows <= BLOCK_ROWS,
        };
        let has_bytes = self.precision == Precision::I8;
        fits && tile.columns > 0
            && (has_bytes || tile.groups == 1 && !tile.pairs)
            && (stride(self.k) / GROUP).is_multiple_of(tile.groups)
            && (!tile.pairs || self.format.is_four_bit())
    }
}

/// Which way each product and each kernel of attention takes, by its key's text; and which asked.
#[derive(Clone, Debug, Default)]
pub struct Choices {
    chosen: BTreeMap<String, String>,
    asked: BTreeMap<String, ProductKey>,
    asked_attention: BTreeMap<String, AttentionKey>,
}

impl Choices {
    /// Key and tile as text; a key with its shape counts more than [one without](ProductKey::general). What is no candidate when it is asked for is as if it were not there.
    pub fn new(chosen: BTreeMap<String, String>) -> Choices {
        Choices { chosen, ..Choices::default() }
    }

    /// One way for one key, whoever asks: for measuring it.
    pub fn only(key: &impl std::fmt::Display, way: impl std::fmt::Display) -> Choices {
        Choices::new(BTreeMap::from([(key.to_string(), way.to_string())]))
    }

    /// The product's way; notes that it asked.
    pub fn take(&mut self, key: &ProductKey, class: Class, pairs: bool) -> Tile {
        let name = key.to_string();
        let prior = key.prior(class, pairs);
        let chosen = self.chosen.get(&name).or_else(|| self.chosen.get(&key.general()));
        let tile =
            chosen.and_then(|chosen| key.candidates(class, pairs).into_iter().find(|t| t.to_string() == *chosen));
        self.asked.insert(name, *key);
        tile.unwrap_or(prior)
    }

    /// The way of a kernel of attention; notes that it asked.
    pub fn take_attention(&mut self, key: &AttentionKey, class: Class) -> Way {
        let name = key.to_string();
        let chosen = self.chosen.get(&name);
        let way = chosen.and_then(|chosen| key.candidates(class).into_iter().find(|way| way.to_string() == *chosen));
        self.asked_attention.insert(name, *key);
        way.unwrap_or_else(|| key.prior(class))
    }

    /// Kernels of attention that asked and have ways.
    pub fn asked_attention(&self) -> Vec<AttentionKey> {
        self.asked_attention.values().copied().filter(|key| key.variant != Variant::Merge).collect()
    }

    /// Products that asked, those of few tokens first.
    pub fn asked(&self) -> Vec<ProductKey> {
        let mut asked: Vec<ProductKey> = self.asked.values().copied().collect();
        asked.sort_by_key(|key| key.tokens);
        asked
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::attention::Shape;
    use crate::model::dtype::DType;
    use crate::model::spec::Activation;

    const PLAIN: Fusion = Fusion { is_normed: false, ends: Ends::Sums };

    fn key(dtype: DType, precision: Precision, fusion: Fusion, tokens: u32) -> ProductKey {
        ProductKey { format: Format::of(dtype), precision, n: 576, k: 576, fusion, tokens }
    }

    #[test]
    fn candidates_are_few_begin_with_the_prior_and_fill_whole_groups() {
        let gated = Fusion { is_normed: true, ends: Ends::Gated(Activation::Silu) };
        let adapted = Fusion { is_normed: true, ends: Ends::Adapted(Activation::Silu) };
        let hidden = Fusion { is_normed: false, ends: Ends::Hidden };
        for lanes in [4, 8, 16, 32, 64] {
            let class = Class::Subgroup(lanes);
            for tokens in matmul::COLUMNS {
                for (dtype, precision) in
                    [(DType::Q4_1, Precision::I8), (DType::Q8_0, Precision::I8), (DType::F16, Precision::F32)]
                {
                    for fusion in [PLAIN, gated, adapted, hidden] {
                        if fusion != PLAIN && (precision == Precision::F32 || lanes == 4) {
                            continue;
                        }
                        let key = key(dtype, precision, fusion, tokens);
                        let found = key.candidates(class, false);
                        assert_eq!(found[0], key.prior(class, false), "{key}");
                        assert!(found.len() <= MAX_CANDIDATES, "{key}: {found:?}");
                        for (i, tile) in found.iter().enumerate() {
                            assert!(!found[..i].contains(tile), "{key}: {tile} twice");
                            assert!(tile.rows * lanes <= 64 && 18 % tile.groups == 0, "{key}: {tile}");
                            assert!(!tile.pairs || dtype == DType::Q4_1, "{key}: {tile}");
                        }
                        if fusion == adapted {
                            assert_eq!(found.len(), 1, "{key}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_choice_that_is_no_candidate_is_as_if_it_were_not_there() {
        let class = Class::Subgroup(8);
        let key = key(DType::Q4_1, Precision::I8, PLAIN, 1);
        let prior = key.prior(class, true);
        let other = key.candidates(class, true)[1];
        assert_ne!(other, prior);
        assert_eq!(Choices::only(&key, other).take(&key, class, true), other);
        let general = Choices::new(BTreeMap::from([(key.general(), other.to_string())]));
        assert_eq!(general.clone().take(&key, class, true), other);
        assert_eq!(general.clone().take(&ProductKey { tokens: 4, ..key }, class, true).columns, 4, "other tokens");
        let impossible = Tile { rows: 32, ..prior };
        assert_eq!(Choices::only(&key, impossible).take(&key, class, true), prior);
        let mut none = Choices::default();
        assert_eq!(none.take(&key, class, true), prior);
        assert_eq!(none.asked(), [key]);
    }

    #[test]
    fn attention_takes_what_was_chosen_for_it_alone() {
        let (kv, softcap) = (crate::kernels::kv_layout::KvFormat::F16, None);
        let shape = Shape { num_heads: 9, num_kv_heads: 3, head_dim: 64, kv, softcap, has_sinks: false };
        let class = Class::Subgroup(8);
        let [single, several] = [Variant::Single, Variant::Several].map(|variant| shape.key(variant, false));
        let other = several.candidates(class)[1];
        let mut choices = Choices::only(&several, other);
        assert_eq!(choices.take_attention(&several, class), other);
        assert_eq!(choices.take_attention(&single, class), single.prior(class));
        assert_eq!(choices.take_attention(&shape.key(Variant::Several, true), class), several.prior(class));
        assert_eq!(choices.asked_attention().len(), 3);
        let impossible = Way { heads: 2, ..other };
        assert_eq!(Choices::only(&several, impossible).take_attention(&several, class), several.prior(class));
    }
}
