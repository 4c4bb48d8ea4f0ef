//! The text of one answer to its parts: reasoning, content, tool calls.

use super::reasoning::{Piece, ReasoningSplitter};
use super::reducer::Part;
use super::tools::{HarmonyParser, ToolParser};

/// Reads one answer; clones read further choices.
#[derive(Clone, Debug)]
pub enum AnswerParser {
    Harmony(HarmonyParser),
    Tags { reasoning: Option<ReasoningSplitter>, tools: Option<Box<ToolParser>> },
}

impl AnswerParser {
    /// Takes the next text.
    pub fn push(&mut self, text: &str, parts: &mut Vec<Part>) {
        match self {
            AnswerParser::Harmony(parser) => parser.push(text, parts),
            AnswerParser::Tags { reasoning: Some(splitter), tools } => {
                splitter.push(text).into_iter().for_each(|piece| take(piece, tools, parts));
            }
            AnswerParser::Tags { reasoning: None, tools } => answer(text, tools, parts),
        }
    }

    /// True inside of reasoning.
    pub fn is_reasoning(&self) -> bool {
        match self {
            AnswerParser::Harmony(parser) => parser.is_reasoning(),
            AnswerParser::Tags { reasoning, .. } => reasoning.as_ref().is_some_and(ReasoningSplitter::is_thinking),
        }
    }

    /// What was held back, at the end.
    pub fn finish(&mut self, parts: &mut Vec<Part>) {
        match self {
            AnswerParser::Harmony(parser) => parser.finish(parts),
            AnswerParser::Tags { reasoning, tools } => {
                let rest = reasoning.as_mut().and_then(ReasoningSplitter::finish);
                rest.into_iter().for_each(|piece| take(piece, tools, parts));
                if let Some(tools) = tools {
                    tools.finish(parts);
                }
            }
        }
    }
}

fn take(piece: Piece, tools: &mut Option<Box<ToolParser>>, parts: &mut Vec<Part>) {
    match piece {
        Piece::Reasoning(text) => parts.push(Part::Reasoning(text)),
        Piece::Answer(text) => answer(&text, tools, parts),
    }
}

fn answer(text: &str, tools: &mut Option<Box<ToolParser>>, parts: &mut Vec<Part>) {
    match tools {
        Some(tools) => tools.push(text, parts),
        None => parts.push(Part::Content(text.to_owned())),
    }
}
