//! Layers in groups that share a block table: those that see equally far, in groups of one size.
//!
//! Guarantees: every layer is in exactly one group, all layers of a group have one window, no group has more than
//! [`LayerGroups::size`] layers. Layer j of every group lives in buffer j of the pool, so that one block id is one page of
//! one group and all groups draw from one pool. A model whose layers all see equally far is one group.
//!
//! Where the number of layers with one window is no multiple of the size, a group's last buffers are padding: bytes that
//! each of its blocks has and nobody writes. The size is the one that makes the fewest groups, and so the
//! fewest tables, among those that waste at most an eighth ([`MAX_PADDING`]); at most [`MAX_GROUPS`] groups are made.

use super::spec::ModelSpec;

/// Groups at most: a table has so many entries for each block of tokens.
pub const MAX_GROUPS: usize = 16;
/// Padding layers at most, as one part in so many of all buffers used.
pub const MAX_PADDING: usize = 8;

/// Which layer is in which group, and where in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerGroups {
    /// Positions that the layers of a group see, the token itself included; `None` is all.
    pub windows: Vec<Option<u32>>, // [num_groups]
    /// Buffers of K, and of V: the most layers that a group has.
    pub size: u32,
    /// Group and buffer of each layer.
    pub layers: Vec<LayerPlace>, // [num_layers]
}

/// Where a layer's keys and values are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerPlace {
    pub group: u32,
    pub buffer: u32,
}

impl LayerGroups {
    /// Groups of a model. A window that holds its longest context is none.
    pub fn of(spec: &ModelSpec) -> LayerGroups {
        let keeps = |window: &u32| *window < spec.max_position;
        let windows: Vec<_> = spec.windows.iter().map(|window| window.filter(keeps)).collect();
        LayerGroups::new(&windows)
    }

    /// Groups of layers that see `windows` positions, one entry per layer.
    pub fn new(windows: &[Option<u32>]) -> LayerGroups {
        assert!(!windows.is_empty(), "a model without layers");
        let kinds = kinds(windows);
        let size = group_size(&kinds.iter().map(|(_, layers)| layers.len()).collect::<Vec<_>>());
        let mut groups = LayerGroups {
            windows: Vec::new(),
            size: size as u32,
            layers: vec![LayerPlace { group: 0, buffer: 0 }; windows.len()],
        };
        for (window, layers) in kinds {
            for members in layers.chunks(size) {
                let group = groups.windows.len() as u32;
                groups.windows.push(window);
                for (buffer, &layer) in (0..).zip(members) {
                    groups.layers[layer] = LayerPlace { group, buffer };
                }
            }
        }
        groups
    }

    pub fn num_groups(&self) -> u32 {
        self.windows.len() as u32
    }

    /// Buffers of all groups that no layer uses, as a share of all.
    pub fn padding(&self) -> f64 {
        let places = self.num_groups() * self.size;
        f64::from(places - self.layers.len() as u32) / f64::from(places)
    }
}

/// Each window with its layers, in order of first appearance.
fn kinds(windows: &[Option<u32>]) -> Vec<(Option<u32>, Vec<usize>)> {
    let mut kinds: Vec<(Option<u32>, Vec<usize>)> = Vec::new();
    for (layer, window) in windows.iter().enumerate() {
        match kinds.iter_mut().find(|(other, _)| other == window) {
            Some((_, layers)) => layers.push(layer),
            None => kinds.push((*window, vec![layer])),
        }
    }
    kinds
}

/// Layers of a group, when so many layers have each window.
fn group_size(counts: &[usize]) -> usize {
    let num_layers: usize = counts.iter().sum();
    let most = counts.iter().copied().max().unwrap_or(1);
    let num_groups = |size: usize| counts.iter().map(|count| count.div_ceil(size)).sum::<usize>();
    let padding = |size: usize| num_groups(size) * size - num_layers;
    let allowed = || (1..=most).filter(|size| num_groups(*size) <= MAX_GROUPS);
    let wastes_little = |size: &usize| padding(*size) * MAX_PADDING <= num_groups(*size) * *size;
    let fewest = allowed().filter(wastes_little).min_by_key(|size| (num_groups(*size), padding(*size)));
    // Where many small groups are not allowed, the one that wastes least.
    fewest.or_else(|| allowed().min_by_key(|size| padding(*size))).unwrap_or(most)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn windows(pattern: &[(usize, Option<u32>)], repeat: usize) -> Vec<Option<u32>> {
        let once: Vec<_> = pattern.iter().flat_map(|(n, window)| std::iter::repeat_n(*window, *n)).collect();
        once.repeat(repeat)
    }

    #[test]
    fn layers_that_see_equally_far_are_one_group() {
        let groups = LayerGroups::new(&windows(&[(1, None)], 30));
        assert_eq!((groups.windows.as_slice(), groups.size, groups.padding()), (&[None][..], 30, 0.0));
        assert!(groups.layers.iter().enumerate().all(|(l, p)| *p == LayerPlace { group: 0, buffer: l as u32 }));
    }

    #[test]
    fn mixed_layers_are_split_into_groups_of_one_size() {
        // One full layer in six, as Gemma 3 has them: 40 + 8, 52 + 10 and 22 + 4 layers.
        let check = |windowed: usize, full: usize, size: u32, num_groups: u32, padding: f64| {
            let layers = [windows(&[(windowed, Some(1024))], 1), windows(&[(full, None)], 1)].concat();
            let groups = LayerGroups::new(&layers);
            assert_eq!((groups.size, groups.num_groups()), (size, num_groups), "{windowed} + {full}");
            assert!((groups.padding() - padding).abs() < 1e-9, "{}", groups.padding());
        };
        check(40, 8, 10, 5, 2.0 / 50.0);
        check(52, 10, 13, 5, 3.0 / 65.0);
        check(22, 4, 4, 7, 2.0 / 28.0);
        check(12, 12, 12, 2, 0.0);
        check(10, 9, 10, 2, 1.0 / 20.0);
        check(1, 1, 1, 2, 0.0);
    }

    #[test]
    fn every_layer_has_a_place_of_its_own_and_tables_stay_narrow() {
        for full in 1..70 {
            let layers = [vec![Some(8); 61], vec![None; full], vec![Some(4); full % 7]].concat();
            let groups = LayerGroups::new(&layers);
            assert!(groups.windows.len() <= MAX_GROUPS, "{full}");
            let mut places: Vec<_> = groups.layers.iter().map(|p| (p.group, p.buffer)).collect();
            assert!(groups.layers.iter().zip(&layers).all(|(p, w)| groups.windows[p.group as usize] == *w));
            assert!(places.iter().all(|(_, buffer)| *buffer < groups.size));
            places.sort_unstable();
            places.dedup();
            assert_eq!(places.len(), layers.len());
        }
    }
}
