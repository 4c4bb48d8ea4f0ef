//! The queue: what holds it up, whose turn it is, who waits and why, and who gave way to whom.

use super::paint::{Quads, describe, owner_dot, small, title_text};
use crate::app::format;
use crate::app::inspect::model::{InspectCommand, InspectModel, Selection};
use crate::app::inspect::queue_words::{binding_words, policy_words, preempt_mode_words, score_words, victim_words};
use crate::app::inspect::requests::{RequestRow, RowState};
use crate::app::inspect::words;
use crate::app::theme::{Theme, radius, space};
use crate::ids::RequestId;
use crate::telemetry::{ClientShare, Preemption, QueuePolicy};
use egui::{CornerRadius, Frame, Label, Margin, Rect, RichText, ScrollArea, Sense, Stroke, Ui, pos2, vec2};

/// Preemptions listed, newest first.
const MAX_PREEMPTIONS: usize = 24;
/// Waiting requests listed before "and n more".
const MAX_WAITING: usize = 64;
/// Clients shown as bars before "and n more".
const MAX_CLIENTS: usize = 12;

/// Everything about the queue at the step shown; side by side where there is room.
pub fn queue_ui(ui: &mut Ui, model: &InspectModel, theme: &Theme, commands: &mut Vec<InspectCommand>) {
    ScrollArea::vertical().id_salt("queue").auto_shrink(false).show(ui, |ui| {
        // Room for the scroll bar.
        ui.set_max_width(ui.available_width() - space::S);
        ui.spacing_mut().item_spacing.y = space::XS;
        if ui.available_width() >= 600.0 {
            ui.columns(2, |columns| {
                binding_ui(&mut columns[0], model, theme);
                waiting_ui(&mut columns[0], model, theme, commands);
                clients_ui(&mut columns[1], model, theme);
                preemptions_ui(&mut columns[1], model, theme, commands);
            });
        } else {
            binding_ui(ui, model, theme);
            clients_ui(ui, model, theme);
            waiting_ui(ui, model, theme, commands);
            preemptions_ui(ui, model, theme, commands);
        }
    });
}

/// The policies in force and the constraint that binds.
fn binding_ui(ui: &mut Ui, model: &InspectModel, theme: &Theme) {
    let snapshot = model.snapshot();
    let (policy, meaning) = policy_words(snapshot.queue.policy);
    let (victim, victim_meaning) = victim_words(snapshot.victim_policy);
    ui.add(Label::new(small(format!("Policy: {}", lower_first(policy)), theme.text)).wrap()).on_hover_text(meaning);
    ui.add(
        Label::new(small(format!("Gives way when blocks are short: {}", lower_first(victim)), theme.text_weak)).wrap(),
    )
    .on_hover_text(victim_meaning);
    let Some(entry) = model.entry() else { return };
    let name = |id| model.requests().label(id);
    let Some(text) = binding_words(&entry.record, snapshot.watermark_blocks, name) else {
        let idle = if entry.record.num_waiting == 0 { "Nothing waits at this step." } else { "The queue moves on." };
        ui.label(small(idle, theme.text_weak));
        return;
    };
    ui.add_space(space::XS);
    Frame::new()
        .stroke(Stroke::new(1.0, theme.warn))
        .corner_radius(CornerRadius::same(radius::MEDIUM))
        .inner_margin(Margin::symmetric(space::S as i8, space::XS as i8))
        .show(ui, |ui| {
            ui.set_width(ui.available_width());
            ui.add(Label::new(RichText::new(text).color(theme.text)).wrap());
        });
}

/// Clients by tokens served: the bar that is shortest goes first.
fn clients_ui(ui: &mut Ui, model: &InspectModel, theme: &Theme) {
    let queue = &model.snapshot().queue;
    if queue.policy != QueuePolicy::Fair || queue.clients.is_empty() {
        return;
    }
    ui.add_space(space::S);
    ui.label(title_text(theme, "Clients"));
    let when = if model.is_live() { "" } else { ", as of now" };
    ui.label(small(format!("Tokens served; the lowest counter goes first{when}"), theme.text_weak));
    let mut clients: Vec<&ClientShare> = queue.clients.iter().collect();
    clients.sort_by_key(|c| (c.counter, c.owner.id));
    let most = clients.iter().map(|c| c.served_tokens).max().unwrap_or(0).max(1);
    for client in clients.iter().take(MAX_CLIENTS) {
        client_ui(ui, model, theme, client, most);
    }
    if clients.len() > MAX_CLIENTS {
        ui.label(small(format!("and {} more", clients.len() - MAX_CLIENTS), theme.text_weak));
    }
}

fn client_ui(ui: &mut Ui, model: &InspectModel, theme: &Theme, client: &ClientShare, most: u64) {
    let (rect, response) = ui.allocate_exact_size(vec2(ui.available_width(), 30.0), Sense::hover());
    let color = theme.owner_color(model.hue_of_owner(client.owner.id));
    let tokens = format::count(client.served_tokens);
    let jobs = format!("{} running, {} waiting", client.running, client.waiting);
    let counter = if client.counter == client.served_tokens {
        String::new()
    } else {
        format!(" · counter {}", format::count(client.counter))
    };
    let top = rect.top() + 8.0;
    ui.painter().circle_filled(pos2(rect.left() + 5.0, top), 4.0, color);
    let right = ui.painter().text(
        pos2(rect.right(), top),
        egui::Align2::RIGHT_CENTER,
        format!("{tokens} · {jobs}"),
        super::paint::small_font(),
        theme.text_weak,
    );
    let width = right.left() - rect.left() - 22.0;
    let at = pos2(rect.left() + 14.0, top);
    super::paint::text_clipped(ui.painter(), at, egui::Align2::LEFT_CENTER, &client.owner.label, width, theme.text);
    let track =
        Rect::from_min_max(pos2(rect.left() + 14.0, rect.bottom() - 9.0), pos2(rect.right(), rect.bottom() - 4.0));
    ui.painter().rect_filled(track, 2.0, theme.bg_active);
    let mut bar = track;
    bar.set_width(track.width() * client.served_tokens as f32 / most as f32);
    ui.painter().rect_filled(bar, 2.0, color);
    let words = format!("{}: {tokens} tokens served, {jobs}{counter}", client.owner.label);
    describe(&response, &words);
    response.on_hover_text(words);
}

/// Who waits, in the order in which the policy takes them.
fn waiting_ui(ui: &mut Ui, model: &InspectModel, theme: &Theme, commands: &mut Vec<InspectCommand>) {
    let Some(entry) = model.entry() else { return };
    let waiting = &entry.record.waiting;
    ui.add_space(space::S);
    ui.label(title_text(theme, &format!("Waiting: {}", format::count(waiting.len() as u64))));
    for (i, (id, reason)) in waiting.iter().take(MAX_WAITING).enumerate() {
        let row = model.rows().iter().find(|r| r.id == *id);
        let mut what = words::wait_words_named(reason, |id| model.requests().label(id));
        if let Some(resume) = row.and_then(|row| resume_words(model, row)) {
            what = format!("{resume} · {what}");
        }
        waiting_row_ui(ui, model, theme, i, *id, &what, commands);
    }
    if waiting.len() > MAX_WAITING {
        ui.label(small(format!("and {} more", format::count((waiting.len() - MAX_WAITING) as u64)), theme.text_weak));
    }
}

/// How a preempted request will go on; `None` for one that never ran.
fn resume_words(model: &InspectModel, row: &RequestRow) -> Option<String> {
    if !matches!(row.state, RowState::Waiting { was_preempted: true, .. }) {
        return None;
    }
    let swapped = model.map().map_or(0, |map| map.host().num_of(row.id));
    Some(match swapped {
        0 => "preempted, will recompute".to_owned(),
        n => format!("preempted, {} in host memory", format::counted(n.into(), "block")),
    })
}

fn waiting_row_ui(
    ui: &mut Ui,
    model: &InspectModel,
    theme: &Theme,
    idx: usize,
    id: RequestId,
    what: &str,
    commands: &mut Vec<InspectCommand>,
) {
    let owner = model.owner_of(id);
    ui.horizontal(|ui| {
        ui.spacing_mut().item_spacing.x = space::XS;
        ui.label(small(format!("{}.", idx + 1), theme.text_weak));
        owner_dot(ui, theme.owner_color(owner.hue));
        let text = RichText::new(format!("{} #{id}", model.requests().label(id))).color(theme.text);
        let label = Label::new(text).truncate().selectable(false).sense(Sense::click());
        if ui.add(label).on_hover_text("Select this request").clicked() {
            commands.push(InspectCommand::Select(Selection::Request(id)));
        }
    });
    ui.indent(("waiting", id), |ui| ui.add(Label::new(small(upper_first(what), theme.warn)).wrap()));
}

/// The last preemptions up to the step shown, newest first; each opens to the candidates' scores.
fn preemptions_ui(ui: &mut Ui, model: &InspectModel, theme: &Theme, commands: &mut Vec<InspectCommand>) {
    let Some(step) = model.step() else { return };
    let found = model.history().preemptions_before(step, MAX_PREEMPTIONS);
    ui.add_space(space::S);
    ui.label(title_text(theme, "Preemptions"));
    if found.is_empty() {
        ui.label(small("None so far.", theme.text_weak));
    }
    for (step, nth, preemption) in found {
        let name = |id| model.requests().label(id);
        let title = format!(
            "Step {}: {} gave way to {}",
            format::count(step),
            name(preemption.victim),
            name(preemption.beneficiary)
        );
        let title = Label::new(RichText::new(title).color(theme.text)).wrap().sense(Sense::click());
        if ui.add(title).on_hover_text("Show this step").clicked() {
            commands.push(InspectCommand::GoToStep(step));
        }
        ui.add(Label::new(small(upper_first(&preempt_mode_words(preemption)), theme.text_weak)).wrap());
        egui::CollapsingHeader::new(small("Who could have given way", theme.text_weak))
            .id_salt(("preemption", step, nth))
            .show_unindented(ui, |ui| scores_ui(ui, model, theme, preemption));
        ui.add_space(space::XS);
    }
}

/// Who could have given way, and by what they were ranked: the highest is the victim.
fn scores_ui(ui: &mut Ui, model: &InspectModel, theme: &Theme, preemption: &Preemption) {
    let (policy, meaning) = victim_words(preemption.policy);
    let by = score_words(preemption.policy);
    ui.label(small(format!("Policy: {} ({by})", lower_first(policy)), theme.text_weak)).on_hover_text(meaning);
    if preemption.scores.is_empty() {
        ui.label(small("No other candidate was ranked.", theme.text_weak));
        return;
    }
    let mut scores = preemption.scores.clone();
    scores.sort_by_key(|(id, score)| (std::cmp::Reverse(*score), *id));
    let most = scores.first().map_or(1, |s| s.1).max(1);
    for (id, score) in scores {
        score_ui(ui, model, theme, id, score, most, id == preemption.victim);
    }
}

fn score_ui(ui: &mut Ui, model: &InspectModel, theme: &Theme, id: RequestId, score: u64, most: u64, is_victim: bool) {
    let (rect, response) = ui.allocate_exact_size(vec2(ui.available_width(), 18.0), Sense::hover());
    let owner = model.owner_of(id);
    let y = rect.center().y;
    let color = theme.owner_color(owner.hue);
    ui.painter().circle_filled(pos2(rect.left() + 5.0, y), 4.0, color);
    let mark = if is_victim { " · gave way" } else { "" };
    let text = format!("{}{mark}", format::count(score));
    let bar = Rect::from_min_max(pos2(rect.right() - 120.0, y - 3.0), pos2(rect.right() - 70.0, y + 3.0));
    let label = format!("{} #{id}", model.requests().label(id));
    let ink = if is_victim { theme.text_strong } else { theme.text };
    let width = bar.left() - rect.left() - 22.0;
    let at = pos2(rect.left() + 14.0, y);
    super::paint::text_clipped(ui.painter(), at, egui::Align2::LEFT_CENTER, &label, width, ink);
    let mut quads = Quads::default();
    quads.rect(bar, theme.bg_active);
    let mut filled = bar;
    filled.set_width(bar.width() * score as f32 / most as f32);
    quads.rect(filled, if is_victim { theme.error } else { theme.text_weak });
    quads.paint(ui.painter());
    let font = super::paint::small_font();
    ui.painter().text(pos2(bar.right() + 6.0, y), egui::Align2::LEFT_CENTER, format::count(score), font, ink);
    describe(&response, &format!("{label}: {text}"));
}

fn lower_first(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or(String::new(), |c| c.to_lowercase().collect::<String>() + chars.as_str())
}

fn upper_first(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or(String::new(), |c| c.to_uppercase().collect::<String>() + chars.as_str())
}
