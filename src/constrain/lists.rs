//! Plain lists of tokens that may, or may not, come next.

use crate::ids::TokenId;
use crate::protocol::TokenConstraint;
use std::sync::Arc;

/// Token lists on top of a grammar, if there is one.
pub struct TokenLists {
    lists: Arc<Lists>,
    grammar: Option<Box<dyn TokenConstraint>>,
}

struct Lists {
    /// A bit per token; `None` allows all.
    allowed: Option<Vec<u32>>,
    /// Sequences that may not be completed.
    banned: Vec<Vec<TokenId>>,
}

impl TokenLists {
    /// `allowed` (`None`: all) are the tokens that may be drawn, `banned` sequences that may not come about.
    pub fn new(
        allowed: Option<&[TokenId]>,
        banned: Vec<Vec<TokenId>>,
        grammar: Option<Box<dyn TokenConstraint>>,
    ) -> Self {
        let bits = |ids: &[TokenId]| {
            let mut words = vec![0u32; ids.iter().max().map_or(0, |max| max / 32 + 1) as usize];
            ids.iter().for_each(|&id| words[(id / 32) as usize] |= 1 << (id % 32));
            words
        };
        let banned = banned.into_iter().filter(|sequence| !sequence.is_empty()).collect();
        TokenLists { lists: Arc::new(Lists { allowed: allowed.map(bits), banned }), grammar }
    }
}

impl TokenConstraint for TokenLists {
    fn allow(&mut self, output: &[TokenId], mask: &mut [u32]) -> Result<(), String> {
        match &mut self.grammar {
            Some(grammar) => grammar.allow(output, mask)?,
            None => mask.fill(u32::MAX),
        }
        if let Some(allowed) = &self.lists.allowed {
            for (i, word) in mask.iter_mut().enumerate() {
                *word &= allowed.get(i).copied().unwrap_or(0);
            }
        }
        for sequence in &self.lists.banned {
            let (last, before) = sequence.split_last().expect("empty sequences were left out");
            if output.ends_with(before)
                && let Some(word) = mask.get_mut((last / 32) as usize)
            {
                *word &= !(1 << (last % 32));
            }
        }
        match mask.iter().all(|word| *word == 0) {
            true => Err("no token is left to be drawn".into()),
            false => Ok(()),
        }
    }

    fn fork(&self) -> Box<dyn TokenConstraint> {
        let grammar = self.grammar.as_ref().map(|grammar| grammar.fork());
        Box::new(TokenLists { lists: self.lists.clone(), grammar })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_cut_each_other() {
        let mut lists = TokenLists::new(Some(&[1, 2, 40]), vec![vec![2], vec![7, 40], vec![]], None);
        let mut mask = [0u32; 2];
        lists.allow(&[], &mut mask).unwrap();
        assert_eq!(mask, [1 << 1, 1 << 8]);
        lists.allow(&[9, 7], &mut mask).unwrap();
        assert_eq!(mask, [1 << 1, 0]);
        let mut none = TokenLists::new(Some(&[2]), vec![vec![2]], Some(lists.fork()));
        assert!(none.allow(&[], &mut mask).is_err());
    }
}
