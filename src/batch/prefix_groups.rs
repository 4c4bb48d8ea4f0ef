//! Rows of one step whose block tables begin alike: many chats on one system prompt, the choices of one prompt, beams.
//!
//! Guarantees: a row is in at most one group; all rows of a group hold the same ids up to the group's length, in whole
//! ranges of [`RANGE`] keys; of all ways to nest (a group and its subgroups), the one that saves most reads is taken. It
//! depends on the tables alone. It does not decide whether reading them together pays: that is the kernel's business.

/// Keys of one attention partial: groups share whole ranges.
pub const RANGE: u32 = 256;

/// Rows that share leading blocks, flat. Group g is rows `rows[start[g]..start[g + 1]]`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PrefixGroups {
    pub rows: Vec<u32>,
    pub start: Vec<u32>, // [num_groups + 1], or empty
    /// Ranges of [`RANGE`] keys that all rows of the group share, at least one.
    pub num_ranges: Vec<u32>, // [num_groups]
}

/// Block tables as [`super::StepBatch`] has them.
#[derive(Clone, Copy, Debug)]
pub struct Tables<'a> {
    pub block_size: u32,
    pub blocks: &'a [u32],
    pub start: &'a [u32],
}

impl Tables<'_> {
    /// The row's ids that cover its whole ranges.
    fn whole(&self, row: u32) -> &[u32] {
        let table = &self.blocks[self.start[row as usize] as usize..self.start[row as usize + 1] as usize];
        let ranges = table.len() as u32 * self.block_size / RANGE;
        &table[..(ranges * RANGE).div_ceil(self.block_size) as usize]
    }

    /// Whole ranges that two rows share.
    fn common(&self, a: u32, b: u32) -> u32 {
        let (a, b) = (self.whole(a), self.whole(b));
        let blocks = a.iter().zip(b).take_while(|(a, b)| a == b).count() as u32;
        blocks * self.block_size / RANGE
    }
}

impl PrefixGroups {
    pub fn len(&self) -> usize {
        self.num_ranges.len()
    }

    pub fn is_empty(&self) -> bool {
        self.num_ranges.is_empty()
    }

    pub fn clear(&mut self) {
        let PrefixGroups { rows, start, num_ranges } = self;
        [rows, start, num_ranges].into_iter().for_each(Vec::clear);
    }

    /// Groups with their rows and shared ranges.
    pub fn iter(&self) -> impl Iterator<Item = (&[u32], u32)> {
        self.start.windows(2).zip(&self.num_ranges).map(|(w, &n)| (&self.rows[w[0] as usize..w[1] as usize], n))
    }

    /// Checks that rows exist, are in one group at most and hold the same blocks.
    pub(super) fn check(&self, tables: Tables<'_>) -> Result<(), String> {
        let num_rows = tables.start.len().saturating_sub(1) as u32;
        let mut seen = vec![false; num_rows as usize];
        for (rows, num_ranges) in self.iter() {
            for &row in rows {
                if row >= num_rows || std::mem::replace(&mut seen[row as usize], true) {
                    return Err(format!("a prefix group holds row {row}, which does not exist or is in another"));
                }
                if tables.common(rows[0], row) < num_ranges {
                    return Err(format!("rows {} and {row} do not share {num_ranges} ranges of blocks", rows[0]));
                }
            }
        }
        Ok(())
    }

    /// Finds the groups of these tables, in place of what `self` held.
    pub fn find(&mut self, tables: Tables<'_>) {
        self.clear();
        let num_rows = tables.start.len().saturating_sub(1) as u32;
        let mut rows: Vec<u32> = (0..num_rows).filter(|&row| !tables.whole(row).is_empty()).collect();
        if rows.len() < 2 {
            return;
        }
        rows.sort_by(|&a, &b| tables.whole(a).cmp(tables.whole(b)).then(a.cmp(&b)));
        let mut found = Vec::new();
        best(&tables, &rows, 0, &mut found);
        found.sort_by_key(|group: &(Vec<u32>, u32)| group.0[0]);
        self.start.push(0);
        for (rows, num_ranges) in found {
            self.rows.extend(rows);
            self.start.push(self.rows.len() as u32);
            self.num_ranges.push(num_ranges);
        }
        if self.num_ranges.is_empty() {
            self.clear();
        }
    }
}

/// Appends the groups that save most among sorted rows that share `depth` ranges; gives the reads of a range saved.
fn best(tables: &Tables<'_>, rows: &[u32], depth: u32, found: &mut Vec<(Vec<u32>, u32)>) -> u32 {
    let (Some(&first), Some(&last)) = (rows.first(), rows.last()) else { return 0 };
    if rows.len() < 2 {
        return 0;
    }
    // Sorted rows: what the first and the last share, all do.
    let shared = tables.common(first, last).max(depth);
    let before = found.len();
    let mut nested = 0;
    let mut from = 0;
    while from < rows.len() {
        // Rows that share one more range than all do.
        let end = from + 1 + rows[from + 1..].iter().take_while(|&&r| tables.common(rows[from], r) > shared).count();
        nested += best(tables, &rows[from..end], shared + 1, found);
        from = end;
    }
    let together = (rows.len() as u32 - 1) * shared;
    if together >= nested && together > 0 {
        found.truncate(before);
        let mut rows = rows.to_vec();
        rows.sort_unstable();
        found.push((rows, shared));
    }
    together.max(nested)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Groups of tables with blocks of 128: two make a range.
    fn groups(tables: &[&[u32]]) -> Vec<(Vec<u32>, u32)> {
        let mut start = vec![0];
        tables.iter().for_each(|t| start.push(start[start.len() - 1] + t.len() as u32));
        let mut groups = PrefixGroups::default();
        groups.find(Tables { block_size: 128, blocks: &tables.concat(), start: &start });
        groups.iter().map(|(rows, n)| (rows.to_vec(), n)).collect()
    }

    #[test]
    fn rows_with_equal_leading_ids_form_a_group() {
        assert_eq!(groups(&[&[1, 2, 3], &[1, 2, 4], &[5, 6], &[1, 2, 3, 7]]), [(vec![0, 1, 3], 1)]);
    }

    #[test]
    fn less_than_a_whole_range_is_no_group() {
        assert!(groups(&[&[1, 2, 3], &[1, 9, 4]]).is_empty());
        assert!(groups(&[&[1], &[1]]).is_empty());
        assert!(groups(&[&[1, 2, 3]]).is_empty());
        assert!(groups(&[]).is_empty());
    }

    #[test]
    fn a_half_shared_range_counts_as_not_shared() {
        assert_eq!(groups(&[&[1, 2, 3, 4], &[1, 2, 3, 5]]), [(vec![0, 1], 1)]);
    }

    #[test]
    fn nested_groups_are_cut_where_most_is_saved() {
        // All four share one range (3 reads saved); the pairs share three each (2 × 3 saved).
        let tables: [&[u32]; 4] = [&[1, 2, 3, 4, 5, 6], &[1, 2, 3, 4, 5, 6], &[1, 2, 7, 8, 9, 9], &[1, 2, 7, 8, 9, 9]];
        assert_eq!(groups(&tables), [(vec![0, 1], 3), (vec![2, 3], 3)]);
        // Four rows of one range and one pair that shares two: together 3, the pair alone 2.
        let tables: [&[u32]; 4] = [&[1, 2, 3, 4], &[1, 2, 5, 6], &[1, 2, 3, 4], &[1, 2, 8, 8]];
        assert_eq!(groups(&tables), [(vec![0, 1, 2, 3], 1)]);
    }

    #[test]
    fn two_prefixes_make_two_groups() {
        let tables: [&[u32]; 5] = [&[9, 8, 1], &[1, 2, 3], &[9, 8, 2], &[1, 2, 4], &[9, 8]];
        assert_eq!(groups(&tables), [(vec![0, 2, 4], 1), (vec![1, 3], 1)]);
    }

    #[test]
    fn groups_that_the_tables_contradict_are_named() {
        let tables = Tables { block_size: 256, blocks: &[4, 5, 4, 6], start: &[0, 2, 4] };
        let group = |rows: &[u32], n: u32| PrefixGroups {
            rows: rows.to_vec(),
            start: vec![0, rows.len() as u32],
            num_ranges: vec![n],
        };
        assert_eq!(group(&[0, 1], 1).check(tables), Ok(()));
        assert!(group(&[0, 1], 2).check(tables).is_err_and(|e| e.contains("do not share")));
        assert!(group(&[0, 0], 1).check(tables).is_err());
        assert!(group(&[0, 2], 1).check(tables).is_err());
    }

    #[test]
    fn large_blocks_hold_several_ranges() {
        let mut groups = PrefixGroups::default();
        groups.find(Tables { block_size: 512, blocks: &[4, 5, 4, 6], start: &[0, 2, 4] });
        assert_eq!(groups.iter().collect::<Vec<_>>(), [(&[0, 1][..], 2)]);
    }
}
