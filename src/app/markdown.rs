//! A growing text as markdown blocks, so that only its tail is looked at again while it is being written.
//!
//! Guarantees: the ranges cover the text in order without overlap; every block but the last is final: more text never
//! changes it. Blocks end at blank lines outside code fences; an indented line goes on with the block before it. It does
//! not attempt to parse inline markup: that is the renderer's.

use std::ops::Range;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BlockKind {
    /// Markdown of any other kind.
    Text,
    /// A fenced code block; `body` is the code without its fences.
    Code { language: String, body: Range<usize> },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    pub range: Range<usize>,
    pub kind: BlockKind,
}

/// The blocks of one message.
#[derive(Clone, Debug, Default)]
pub struct MarkdownDoc {
    blocks: Vec<Block>,
    len: usize,
}

impl MarkdownDoc {
    /// Brings the blocks up to date with `text`, which is the text of the last call with more at its end, or any other.
    pub fn update(&mut self, text: &str) {
        if text.len() == self.len {
            return;
        }
        let start = match self.blocks.pop() {
            Some(last) if text.len() > self.len && text.is_char_boundary(last.range.start) => last.range.start,
            _ => {
                self.blocks.clear();
                0
            }
        };
        self.len = text.len();
        split(text, start, &mut self.blocks);
    }

    pub fn blocks(&self) -> &[Block] {
        &self.blocks
    }
}

/// An open code fence.
struct Fence {
    mark: char,
    len: usize,
    start: usize,
    body: usize,
    language: String,
}

fn split(text: &str, from: usize, blocks: &mut Vec<Block>) {
    let mut open: Option<Range<usize>> = None;
    let mut after_blank = false;
    let mut fence: Option<Fence> = None;
    let mut at = from;
    for line in text[from..].split_inclusive('\n') {
        let (start, end) = (at, at + line.len());
        at = end;
        if let Some(f) = &fence {
            if closes(line, f) {
                blocks.push(code_block(f, start, end));
                fence = None;
            }
            continue;
        }
        // A fence inside a list item stays with the list: its indentation belongs to it.
        let indent = line.len() - line.trim_start_matches([' ', '\t']).len();
        if let Some((mark, len, language)) = opening_fence(line).filter(|_| indent < 2) {
            close_text(&mut open, blocks);
            fence = Some(Fence { mark, len, start, body: end, language });
            after_blank = false;
            continue;
        }
        if line.trim().is_empty() {
            after_blank = true;
            if let Some(range) = &mut open {
                range.end = end;
            }
            continue;
        }
        match &mut open {
            Some(range) if !after_blank || indent >= 2 => range.end = end,
            _ => {
                close_text(&mut open, blocks);
                open = Some(start..end);
            }
        }
        after_blank = false;
    }
    if let Some(f) = fence {
        blocks.push(code_block(&f, text.len(), text.len()));
    }
    close_text(&mut open, blocks);
}

fn close_text(open: &mut Option<Range<usize>>, blocks: &mut Vec<Block>) {
    if let Some(range) = open.take() {
        blocks.push(Block { range, kind: BlockKind::Text });
    }
}

fn code_block(fence: &Fence, body_end: usize, end: usize) -> Block {
    let body = fence.body.min(body_end)..body_end;
    Block { range: fence.start..end, kind: BlockKind::Code { language: fence.language.clone(), body } }
}

/// The fence character, its count and the language, if this line opens a code block.
fn opening_fence(line: &str) -> Option<(char, usize, String)> {
    let line = line.trim();
    let mark = line.chars().next().filter(|c| *c == '`' || *c == '~')?;
    let len = line.chars().take_while(|c| *c == mark).count();
    let info = line[len..].trim();
    if len < 3 || (mark == '`' && info.contains('`')) {
        return None;
    }
    Some((mark, len, info.split_whitespace().next().unwrap_or("").to_owned()))
}

fn closes(line: &str, fence: &Fence) -> bool {
    let line = line.trim();
    line.chars().count() >= fence.len && line.chars().all(|c| c == fence.mark)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks_of(text: &str) -> Vec<Block> {
        let mut doc = MarkdownDoc::default();
        doc.update(text);
        doc.blocks().to_vec()
    }

    fn texts<'a>(text: &'a str, blocks: &[Block]) -> Vec<&'a str> {
        blocks.iter().map(|b| &text[b.range.clone()]).collect()
    }

    const SAMPLE: &str =
        "# Head\n\nOne *two*\nthree\n\n- a\n\n  more of a\n\n- b\n\n```rust\nfn f() {\n\n}\n```\nTail é\n\n~~~\nopen";

    #[test]
    fn blocks_end_at_blank_lines_outside_fences() {
        let blocks = blocks_of(SAMPLE);
        assert_eq!(
            texts(SAMPLE, &blocks),
            [
                "# Head\n\n",
                "One *two*\nthree\n\n",
                "- a\n\n  more of a\n\n",
                "- b\n\n",
                "```rust\nfn f() {\n\n}\n```\n",
                "Tail é\n\n",
                "~~~\nopen",
            ]
        );
        let BlockKind::Code { language, body } = &blocks[4].kind else { panic!("a code block") };
        assert_eq!((language.as_str(), &SAMPLE[body.clone()]), ("rust", "fn f() {\n\n}\n"));
        let BlockKind::Code { body, .. } = &blocks[6].kind else { panic!("an open fence is code") };
        assert_eq!(&SAMPLE[body.clone()], "open");
    }

    #[test]
    fn growing_text_gives_the_same_blocks_and_never_changes_final_ones() {
        let mut doc = MarkdownDoc::default();
        let mut finals: Vec<Block> = Vec::new();
        let ends = (0..=SAMPLE.len()).filter(|i| SAMPLE.is_char_boundary(*i));
        for end in ends {
            doc.update(&SAMPLE[..end]);
            assert_eq!(doc.blocks(), blocks_of(&SAMPLE[..end]), "at {end}");
            let now = &doc.blocks()[..doc.blocks().len().saturating_sub(1)];
            assert!(now.len() >= finals.len() && now[..finals.len()] == finals[..], "at {end}");
            finals = now.to_vec();
        }
    }

    #[test]
    fn a_shorter_text_starts_anew() {
        let mut doc = MarkdownDoc::default();
        doc.update("a\n\nb\n\nc");
        doc.update("x\n\n");
        assert_eq!(doc.blocks().len(), 1);
        doc.update("");
        assert!(doc.blocks().is_empty());
    }

    #[test]
    fn inline_code_with_three_ticks_is_no_fence() {
        assert_eq!(blocks_of("```a``` b\nc").len(), 1);
        assert!(matches!(blocks_of("```a``` b")[0].kind, BlockKind::Text));
    }
}
