//! What the marks mean, how many blocks each stands for, and the filter that a click sets.

use super::block_look::{BlockFilter, Corner, notch, pin};
use super::paint::{Quads, small};
use crate::app::format;
use crate::app::inspect::map::BlockMap;
use crate::app::inspect::model::{InspectModel, Owner};
use crate::app::theme::{Theme, mix, radius, space};
use egui::{Color32, CornerRadius, Rect, Response, Role, ScrollArea, Sense, Ui, WidgetInfo, pos2, vec2};
use std::collections::BTreeMap;

/// Shapes shown beside a legend entry.
#[derive(Clone, Copy)]
enum Icon {
    Owner(Color32),
    Shared,
    CachedIdle,
    Free,
    Tail,
    Evicted,
    Pinned,
    Copied,
}

/// Width of an owner's chip that can be read, of what it has beside the name, and of the button for the rest.
const OWNER_LEAST: f32 = 112.0;
const OWNER_REST: f32 = 64.0;
const MORE: f32 = 44.0;

/// Exclusively held blocks by owner, largest first.
pub fn owner_counts(model: &InspectModel, map: &BlockMap) -> Vec<(Owner, u32)> {
    let mut by_owner: BTreeMap<u64, (Owner, u32)> = BTreeMap::new();
    for (&request, &n) in &map.counts().exclusive {
        let owner = model.owner_of(request);
        by_owner.entry(owner.id).or_insert((owner, 0)).1 += n;
    }
    let mut counts: Vec<(Owner, u32)> = by_owner.into_values().collect();
    counts.sort_by(|a, b| b.1.cmp(&a.1).then(a.0.id.cmp(&b.0.id)));
    counts
}

/// The legend, one line that scrolls sideways when there are many owners.
pub fn legend_ui(ui: &mut Ui, filter: &mut Option<BlockFilter>, model: &InspectModel, map: &BlockMap, theme: &Theme) {
    let counts = map.counts();
    let full_width = ui.available_width();
    ScrollArea::horizontal().id_salt("legend").auto_shrink([false, true]).show(ui, |ui| {
        ui.horizontal(|ui| {
            ui.spacing_mut().item_spacing.x = space::XS;
            let left = ui.cursor().left();
            let fixed = [
                (Icon::Shared, "shared", counts.shared, BlockFilter::Shared),
                (Icon::CachedIdle, "cached", counts.cached_idle, BlockFilter::CachedIdle),
                (Icon::Free, "free", counts.free, BlockFilter::Free),
            ];
            for (icon, label, n, value) in fixed {
                chip(ui, theme, icon, (label, f32::INFINITY), n, value, filter);
            }
            // These marks are rare: they are explained while there are any.
            let rare = [
                (Icon::Pinned, "pinned", counts.pinned, BlockFilter::Pinned),
                (Icon::Copied, "copied on write", counts.copied, BlockFilter::Copied),
            ];
            for (icon, label, n, value) in rare {
                if n > 0 || *filter == Some(value) {
                    chip(ui, theme, icon, (label, f32::INFINITY), n, value, filter);
                }
            }
            for (icon, label) in [(Icon::Tail, "partly filled"), (Icon::Evicted, "just evicted")] {
                let (rect, _) = ui.allocate_exact_size(vec2(14.0, 20.0), Sense::hover());
                paint_icon(ui, theme, icon, Rect::from_center_size(rect.center(), vec2(11.0, 11.0)));
                ui.label(small(label, theme.text_weak));
                ui.add_space(space::XS);
            }
            let room = full_width - (ui.cursor().left() - left);
            owners_ui(ui, theme, &owner_counts(model, map), room, filter);
        });
    });
}

/// Owners side by side, and those for whom there is no room behind a button that says how many.
fn owners_ui(ui: &mut Ui, theme: &Theme, owners: &[(Owner, u32)], room: f32, filter: &mut Option<BlockFilter>) {
    let share = room / owners.len().max(1) as f32;
    // All of them where their names can be read; else as many as can.
    let num_shown = if share >= OWNER_LEAST { owners.len() } else { ((room - MORE) / OWNER_LEAST).max(1.0) as usize };
    let num_shown = num_shown.min(owners.len());
    let each = if num_shown == owners.len() { share } else { (room - MORE) / num_shown as f32 };
    let width = (each - OWNER_REST).clamp(OWNER_LEAST - OWNER_REST, 150.0);
    let mut owner_chip = |ui: &mut Ui, (owner, n): &(Owner, u32), width: f32| {
        let icon = Icon::Owner(theme.owner_color(owner.hue));
        chip(ui, theme, icon, (&owner.label, width), *n, BlockFilter::Owner(owner.id), filter);
    };
    owners[..num_shown].iter().for_each(|owner| owner_chip(ui, owner, width));
    let rest = &owners[num_shown..];
    if !rest.is_empty() {
        let more = ui.menu_button(small(format!("+{}", rest.len()), theme.text), |ui| {
            rest.iter().for_each(|owner| owner_chip(ui, owner, 200.0));
        });
        more.response
            .on_hover_text(format!("{} with blocks of their own", format::counted(rest.len() as u64, "more owner")));
    }
}

fn chip(
    ui: &mut Ui,
    theme: &Theme,
    icon: Icon,
    (label, width): (&str, f32),
    n: u32,
    value: BlockFilter,
    filter: &mut Option<BlockFilter>,
) {
    let is_on = *filter == Some(value);
    let response = chip_button(ui, theme, icon, (label, width), &format::count(u64::from(n)), is_on);
    let words = format!("Show only {label}: {}", format::counted(u64::from(n), "block"));
    response.widget_info(|| WidgetInfo::selected(Role::Button, true, is_on, &words));
    if response.on_hover_text(words.as_str()).clicked() {
        *filter = if is_on { None } else { Some(value) };
    }
}

fn chip_button(
    ui: &mut Ui,
    theme: &Theme,
    icon: Icon,
    (label, width): (&str, f32),
    count: &str,
    is_on: bool,
) -> Response {
    let layout = |text: &str, width: f32, color| {
        let mut job = egui::text::LayoutJob::simple_singleline(text.to_owned(), super::paint::small_font(), color);
        job.wrap = egui::text::TextWrapping::truncate_at_width(width);
        ui.painter().layout_job(job)
    };
    let (label, count) = (layout(label, width, theme.text), layout(count, f32::INFINITY, theme.text_weak));
    let size = vec2(26.0 + label.size().x + 5.0 + count.size().x + 6.0, 22.0);
    let (rect, response) = ui.allocate_exact_size(size, Sense::click());
    let fill = match (is_on, response.hovered()) {
        (true, _) => theme.accent_bg,
        (false, true) => theme.bg_hover,
        (false, false) => Color32::TRANSPARENT,
    };
    ui.painter().rect_filled(rect, CornerRadius::same(radius::MEDIUM), fill);
    paint_icon(ui, theme, icon, Rect::from_center_size(pos2(rect.left() + 13.0, rect.center().y), vec2(11.0, 11.0)));
    let mut x = rect.left() + 24.0;
    for galley in [label, count] {
        let y = rect.center().y - galley.size().y / 2.0;
        let width = galley.size().x;
        ui.painter().galley(pos2(x, y), galley, theme.text);
        x += width + 5.0;
    }
    response
}

fn paint_icon(ui: &Ui, theme: &Theme, icon: Icon, rect: Rect) {
    let rect = super::paint::snap(ui, rect);
    let mut quads = Quads::default();
    let neutral = theme.text_weak;
    match icon {
        Icon::Owner(color) => quads.rect(rect, color),
        Icon::Shared => {
            quads.rect(rect, neutral);
            notch(&mut quads, rect, Corner::RightTop, theme.text_strong, theme.bg_panel);
        }
        Icon::Copied => {
            quads.rect(rect, neutral);
            notch(&mut quads, rect, Corner::LeftBottom, theme.text_strong, theme.bg_panel);
        }
        Icon::Pinned => {
            quads.rect(rect, neutral);
            pin(&mut quads, rect, theme.accent, theme.bg_panel);
        }
        Icon::CachedIdle => quads.outline(rect, 1.0, neutral),
        Icon::Free => quads.rect(Rect::from_center_size(rect.center(), vec2(3.0, 3.0)), theme.text_faint),
        Icon::Tail => {
            quads.rect(rect, mix(theme.bg_panel, neutral, 0.28));
            quads.rect(Rect::from_min_max(pos2(rect.left(), rect.center().y), rect.max), neutral);
        }
        Icon::Evicted => quads.hatch(rect, theme.error),
    }
    quads.paint(ui.painter());
}

/// Totals beside the picture: "110 of 128 blocks used · sharing saves 18 blocks = 9 MiB".
pub fn totals_words(model: &InspectModel, map: &BlockMap) -> String {
    let counts = map.counts();
    let total = u64::from(counts.total());
    let mut out = format!("{} of {} used", format::count(u64::from(counts.used())), format::counted(total, "block"),);
    if counts.saved > 0 {
        let saved = u64::from(counts.saved);
        let bytes = saved * model.snapshot().kv_bytes_per_block;
        out += &format!(" · sharing saves {}", format::counted(saved, "block"));
        if bytes > 0 {
            out += &format!(" = {}", format::bytes(bytes));
        }
    }
    out
}
