//! The layer groups that a cache serves: layers that see equally far share a table.
//!
//! Guarantees: at least one group and at most [`MAX_GROUPS`]; a window is at least 1. It does not know layers: which layer
//! is in which group is for those who compute.

/// Groups that a model may have: its table of one sequence is so many entries wide.
pub const MAX_GROUPS: usize = 16;

/// How far each group of layers sees. All groups draw blocks of one size from one pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(try_from = "Vec<Option<u32>>", into = "Vec<Option<u32>>")]
pub struct KvGroups {
    len: u8,
    windows: [u32; MAX_GROUPS], // 0: all
}

impl Default for KvGroups {
    /// A model without windows.
    fn default() -> Self {
        KvGroups::ONE
    }
}

impl KvGroups {
    /// One group that sees everything: models without windows.
    pub const ONE: KvGroups = KvGroups { len: 1, windows: [0; MAX_GROUPS] };

    /// `windows[g]` is the number of positions that group g sees, the token itself included; `None` is all.
    ///
    /// Panics without a group, with more than [`MAX_GROUPS`], or with a window of 0.
    pub fn new(windows: &[Option<u32>]) -> KvGroups {
        assert!((1..=MAX_GROUPS).contains(&windows.len()), "{} layer groups", windows.len());
        assert!(!windows.contains(&Some(0)), "a window of 0 positions");
        let mut groups = KvGroups { len: windows.len() as u8, windows: [0; MAX_GROUPS] };
        for (to, from) in groups.windows.iter_mut().zip(windows) {
            *to = from.unwrap_or(0);
        }
        groups
    }

    /// Number of groups, at least 1.
    pub fn num(&self) -> u32 {
        u32::from(self.len)
    }

    /// Positions that a token of this group sees, itself included; `None` is all.
    pub fn window(&self, group: u32) -> Option<u32> {
        Some(self.windows[group as usize]).filter(|window| *window > 0)
    }

    /// The window of each group.
    pub fn windows(&self) -> impl ExactSizeIterator<Item = Option<u32>> + '_ {
        (0..self.num()).map(|group| self.window(group))
    }

    /// True when some group forgets.
    pub fn has_windows(&self) -> bool {
        self.windows.iter().any(|window| *window > 0)
    }

    /// Blocks, over all groups, that a sequence holds at most until its first `tokens` positions are computed in steps of
    /// `chunk` of them: a windowed group has what the step's first token sees and what the step writes.
    pub fn blocks_for(&self, tokens: u32, chunk: u32, block_size: u32) -> u32 {
        let rows = tokens.div_ceil(block_size);
        let of_group = |window: Option<u32>| match window {
            None => rows,
            // So many positions lie in at most so many blocks, wherever the first begins.
            Some(window) => {
                window.saturating_add(chunk).saturating_sub(2).div_ceil(block_size).saturating_add(1).min(rows)
            }
        };
        self.windows().fold(0, |sum, window| of_group(window).saturating_add(sum))
    }

    /// The most positions, up to `limit`, for which [`KvGroups::blocks_for`] is at most `blocks`.
    pub fn tokens_in(&self, blocks: u32, limit: u32, chunk: u32, block_size: u32) -> u32 {
        let fits = |tokens: u32| self.blocks_for(tokens, chunk, block_size) <= blocks;
        let (mut low, mut high) = (0, limit);
        while low < high {
            let middle = low + (high - low).div_ceil(2);
            (low, high) = if fits(middle) { (middle, high) } else { (low, middle - 1) };
        }
        low
    }

    /// The group whose blocks name prefixes: the first that keeps everything, or the first.
    pub(super) fn anchor(&self) -> u32 {
        self.windows().position(|window| window.is_none()).unwrap_or(0) as u32
    }
}

impl From<KvGroups> for Vec<Option<u32>> {
    fn from(groups: KvGroups) -> Self {
        groups.windows().collect()
    }
}

impl TryFrom<Vec<Option<u32>>> for KvGroups {
    type Error = String;

    fn try_from(windows: Vec<Option<u32>>) -> Result<Self, String> {
        if !(1..=MAX_GROUPS).contains(&windows.len()) || windows.contains(&Some(0)) {
            return Err(format!("{} layer groups, or a window of 0 positions", windows.len()));
        }
        Ok(KvGroups::new(&windows))
    }
}

/// The lowest position that a query at `position` sees.
pub fn lowest_seen(window: Option<u32>, position: u32) -> u32 {
    window.map_or(0, |window| position.saturating_add(1).saturating_sub(window))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_are_named_by_a_group_that_keeps_everything() {
        assert_eq!(KvGroups::ONE.windows().collect::<Vec<_>>(), [None]);
        assert_eq!(KvGroups::new(&[Some(4), None, Some(8), None]).anchor(), 1);
        assert_eq!(KvGroups::new(&[Some(4), Some(8)]).anchor(), 0);
        assert!(!KvGroups::ONE.has_windows() && KvGroups::new(&[None, Some(1)]).has_windows());
    }

    #[test]
    fn windowed_groups_need_what_a_step_sees_and_writes() {
        assert_eq!(KvGroups::ONE.blocks_for(17, 5, 4), 5);
        let mixed = KvGroups::new(&[None, Some(6)]);
        assert_eq!(mixed.blocks_for(8, 1, 4), 2 + 2, "what is short is kept whole");
        // Positions 3..9 lie in blocks 0, 1 and 2 of 4.
        assert_eq!(mixed.blocks_for(400, 1, 4), 100 + 3);
        assert_eq!(mixed.blocks_for(400, 9, 4), 100 + 5);
        for (window, chunk, size) in [(1, 1, 4), (6, 1, 4), (6, 9, 4), (4, 4, 4), (5, 8, 1), (7, 3, 8)] {
            let first = |computed: u32| lowest_seen(Some(window), computed) / size;
            let most = (0..100u32).map(|computed| (computed + chunk).div_ceil(size) - first(computed)).max();
            assert_eq!(
                most,
                Some(KvGroups::new(&[Some(window)]).blocks_for(1000, chunk, size)),
                "{window} {chunk} {size}"
            );
        }
    }

    #[test]
    fn the_longest_sequence_of_a_pool() {
        assert_eq!(KvGroups::ONE.tokens_in(5, 1000, 8, 4), 20);
        assert_eq!(KvGroups::new(&[None, Some(6)]).tokens_in(10, 1000, 1, 4), 28);
        assert_eq!(KvGroups::new(&[Some(6)]).tokens_in(3, u32::MAX, 1, 4), u32::MAX, "it never ends");
        assert_eq!(KvGroups::new(&[Some(6)]).tokens_in(2, 1000, 1, 4), 8);
    }

    #[test]
    fn a_window_counts_the_token_itself() {
        assert_eq!([0, 3, 4, 9].map(|p| lowest_seen(Some(4), p)), [0, 0, 1, 6]);
        assert_eq!(lowest_seen(None, 1000), 0);
        assert_eq!(lowest_seen(Some(1), 7), 7);
    }
}
