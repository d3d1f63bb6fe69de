//! Caches that are opened, extended, forked, truncated and closed at random, compared with plain vectors.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

use larder_core::{CheckpointPolicy, KV_PAGE_TOKENS, Rng};
use larder_kernels::widen;

use super::*;
use crate::kv::{AuxiliaryShape, KvFormat, KvUsage, RowShape, StateLens};

const POLICY: CheckpointPolicy = CheckpointPolicy { every: 50, most: 3, pins: 3 };

/// What a layer of the test is made of.
#[derive(Clone, Copy)]
enum Kind {
    /// Keys and values of this many heads and widths.
    Attention {
        heads: usize,
        widths: [usize; 2],
        mask: AttentionMask,
    },
    /// Keys, and auxiliary rows.
    Latent {
        width: usize,
        auxiliary: &'static [AuxiliaryShape],
    },
    Recurrent(StateLens),
}

const fn auxiliary(width: usize, tokens_per_row: usize, mask: AttentionMask) -> AuxiliaryShape {
    AuxiliaryShape { row: RowShape { heads: 1, width }, tokens_per_row, mask, chosen: None }
}

const LAYERS: [Kind; 6] = [
    Kind::Attention { heads: 2, widths: [3, 4], mask: AttentionMask::Causal },
    Kind::Attention { heads: 1, widths: [4, 4], mask: AttentionMask::SlidingWindow(70) },
    Kind::Recurrent(StateLens { window: 1, recurrence: 2 }),
    Kind::Latent { width: 5, auxiliary: &[] },
    Kind::Attention { heads: 2, widths: [2, 2], mask: AttentionMask::Chunked(150) },
    Kind::Latent {
        width: 3,
        auxiliary: &[
            auxiliary(2, 1, AttentionMask::Causal),
            auxiliary(3, 4, AttentionMask::Causal),
            auxiliary(1, 1, AttentionMask::SlidingWindow(8)),
            auxiliary(1, 3, AttentionMask::Chunked(96)),
        ],
    },
];

impl Kind {
    fn shape(self) -> LayerShape {
        match self {
            Kind::Attention { heads, widths, mask } => {
                let [keys, values] = widths.map(|width| RowShape { heads, width });
                LayerShape::attention(keys, values, mask)
            }
            Kind::Latent { width, auxiliary } => LayerShape::latents(width).with_auxiliary(auxiliary.to_vec()),
            Kind::Recurrent(lens) => LayerShape::recurrent(lens),
        }
    }
}

/// The rows of keys, values, and auxiliary ones of each layer.
static PARTS: LazyLock<Vec<Vec<AuxiliaryShape>>> = LazyLock::new(|| {
    let parts = |kind: Kind| {
        let LayerShape { keys, values, mask, auxiliary, .. } = kind.shape();
        let rows = keys.into_iter().chain(values);
        rows.map(|row| AuxiliaryShape { row, tokens_per_row: 1, mask, chosen: None }).chain(auxiliary).collect()
    };
    LAYERS.into_iter().map(parts).collect()
});

/// The rows of part `part` of a layer.
fn part_of(layer: &LayerKv, kind: Kind, part: usize) -> &KvRows {
    match (kind, part) {
        (_, 0) => &layer.keys,
        (Kind::Attention { .. }, _) => &layer.values,
        (_, part) => &layer.auxiliary[part - 1].rows,
    }
}

fn new_cache(pool: &Arc<KvPool>) -> KvCache {
    KvCache::new(LAYERS.iter().map(|kind| kind.shape()), pool)
}

/// The cache, saved and read again.
fn reloaded(cache: &KvCache, pool: &Arc<KvPool>) -> KvCache {
    let (mut bytes, mut loaded) = (Vec::new(), new_cache(pool));
    if cache.len > 0 {
        cache.save(&mut bytes).unwrap();
        let mut rest = &bytes[..];
        let mut from = SavedState::new(&mut rest, bytes.len() as u64);
        loaded.load_checkpoints(cache.len, &mut from).unwrap();
        for (layer, kind) in loaded.layers.iter_mut().zip(LAYERS) {
            layer.load(kind.shape(), cache.len, pool, &mut from).unwrap();
        }
        assert!(from.require(1).is_err(), "all of it was read");
    }
    loaded.len = cache.len;
    loaded
}

/// The value of a token in a row.
fn value(token: u32, part: usize, head: usize, column: usize) -> f32 {
    ((token as usize * 31 + part * 7 + head * 5 + column * 3) % 101) as f32
}

fn rows(tokens: &[u32], part: usize, heads: usize, width: usize) -> Vec<f32> {
    let of = |token: u32| (0..heads).flat_map(move |h| (0..width).map(move |c| value(token, part, h, c)));
    tokens.iter().flat_map(|token| of(*token)).collect()
}

/// Appends the rows of the blocks that end with one of the tokens; the value of a row is that of its block's last
/// token.
fn append_auxiliary(layer: &mut LayerKv, kind: usize, shape: &AuxiliaryShape, before: usize, tokens: &[u32]) {
    for (at, token) in (before + 1..).zip(tokens) {
        if at.is_multiple_of(shape.tokens_per_row) {
            layer.auxiliary[kind].append(&rows(&[*token], kind + 1, 1, shape.row.width)).unwrap();
        }
        layer.release_unneeded(kind);
    }
}

/// Appends tokens to a cache, as a forward pass does.
fn append(cache: &mut KvCache, tokens: &[u32]) {
    let before = cache.len;
    cache.begin(tokens.len());
    for (layer, kind) in cache.layers.iter_mut().zip(LAYERS) {
        match kind {
            Kind::Attention { heads, widths, mask } => {
                layer.keys.append(&rows(tokens, 0, heads, widths[0]), heads, widths[0]).unwrap();
                layer.values.append(&rows(tokens, 1, heads, widths[1]), heads, widths[1]).unwrap();
                layer.release_unseen(mask);
            }
            Kind::Latent { width, auxiliary } => {
                layer.keys.append(&rows(tokens, 0, 1, width), 1, width).unwrap();
                for (i, shape) in auxiliary.iter().enumerate() {
                    append_auxiliary(layer, i, shape, before, tokens);
                }
            }
            Kind::Recurrent(lens) => {
                layer.recurrent.take_in(tokens.len(), lens, &layer.kept, |state, at| {
                    let token = tokens[at] as f32;
                    state.copy_from_slice(&[token, state[1] + 1.0, (state[2] * 3.0 + token) % 1009.0]);
                });
            }
        }
    }
    cache.len += tokens.len();
}

/// A sequence in plain vectors. A page or a state is a number; what is shared has the same number in several sequences.
#[derive(Clone, Default)]
struct Naive {
    tokens: Vec<u32>,
    /// By layer and part, the page of each index; `None` if it was given back.
    pages: BTreeMap<(usize, usize), Vec<Option<usize>>>,
    state: Option<usize>,
    /// Positions and states.
    checkpoints: Vec<(usize, usize)>,
    regular: Vec<usize>,
    pinned: Vec<usize>,
    wanted: Vec<usize>,
}

impl Naive {
    fn append(&mut self, token: u32, others: &BTreeSet<usize>, next: &mut usize) {
        let at = self.tokens.len();
        self.tokens.push(token);
        let mut fresh = || {
            *next += 1;
            *next
        };
        for (i, parts) in PARTS.iter().enumerate() {
            for (part, shape) in parts.iter().enumerate() {
                let pages = self.pages.entry((i, part)).or_default();
                if !(at + 1).is_multiple_of(shape.tokens_per_row) {
                    continue;
                }
                if (at / shape.tokens_per_row).is_multiple_of(KV_PAGE_TOKENS) {
                    pages.push(Some(fresh()));
                }
                let last = pages.last_mut().unwrap();
                if others.contains(&last.unwrap()) {
                    *last = Some(fresh());
                }
            }
        }
        let shared = |id: usize| others.contains(&id) || self.checkpoints.iter().any(|(_, state)| *state == id);
        let state = self.state.filter(|id| !shared(*id)).unwrap_or_else(fresh);
        self.state = Some(state);
        let (is_regular, is_pinned) = ((at + 1).is_multiple_of(POLICY.every), self.wanted.contains(&(at + 1)));
        if is_regular {
            self.regular.push(at + 1);
            POLICY.superfluous(&self.regular).map(|i| self.regular.remove(i));
        }
        if is_pinned {
            self.pinned.push(at + 1);
            if self.pinned.len() > POLICY.pins {
                let unwanted = self.pinned.iter().position(|pinned| !self.wanted.contains(pinned));
                self.pinned.remove(unwanted.unwrap_or(0));
            }
        }
        if is_regular || is_pinned {
            self.checkpoints.push((at + 1, state));
        }
        let Naive { regular, pinned, checkpoints, .. } = self;
        checkpoints.retain(|(at, _)| regular.contains(at) || pinned.contains(at));
    }

    /// Gives pages back, after a pass.
    fn release(&mut self) {
        for ((i, part), pages) in &mut self.pages {
            let AuxiliaryShape { tokens_per_row, mask, .. } = PARTS[*i][*part];
            let tokens = self.tokens.len() / tokens_per_row * tokens_per_row;
            let behind = REWIND_POSITIONS + POLICY.every;
            let first = mask.first_visible(tokens).saturating_sub(behind) / tokens_per_row / KV_PAGE_TOKENS;
            let is_pinned =
                |page: usize| self.pinned.iter().any(|at| pages_needed(PARTS[*i][*part], *at).contains(&page));
            let released = pages.iter_mut().enumerate().take(first).filter(|(page, _)| !is_pinned(*page));
            released.for_each(|(_, page)| *page = None);
        }
    }

    /// How many of the first `len` tokens can be kept.
    fn keepable(&self, len: usize) -> usize {
        let mut keep = len.min(self.tokens.len());
        while let Some(less) = (0..LAYERS.len()).map(|i| self.keepable_in(i, keep)).find(|kept| *kept < keep) {
            keep = less;
        }
        keep
    }

    fn keepable_in(&self, layer: usize, len: usize) -> usize {
        if let Kind::Recurrent(_) = LAYERS[layer] {
            let all = self.checkpoints.iter().map(|(at, _)| *at).chain([self.tokens.len()]);
            return all.filter(|at| *at <= len).max().unwrap_or(0);
        }
        let has_rows = |len: &usize| {
            PARTS[layer].iter().enumerate().all(|(part, shape)| {
                let pages = self.pages.get(&(layer, part)).map_or(&[][..], |pages| pages);
                pages_needed(*shape, *len).all(|page| pages.get(page).is_some_and(Option::is_some))
            })
        };
        let pinned = self.pinned.iter().copied().filter(|at| *at < len);
        if has_rows(&len) { len } else { pinned.filter(has_rows).max().unwrap_or(0) }
    }

    fn truncate(&mut self, len: usize) -> usize {
        let keep = self.keepable(len);
        if keep < self.tokens.len() {
            self.tokens.truncate(keep);
            for ((i, part), pages) in &mut self.pages {
                let rows = keep / PARTS[*i][*part].tokens_per_row;
                pages.truncate(rows.div_ceil(KV_PAGE_TOKENS));
            }
            self.checkpoints.retain(|(at, _)| *at <= keep);
            self.regular.retain(|at| *at <= keep);
            self.pinned.retain(|at| *at <= keep);
            self.state = self.checkpoints.last().map(|(_, state)| *state);
        }
        keep
    }

    /// Gives the sequence memory of its own.
    fn renumber(&mut self, next: &mut usize) {
        let mut fresh = || {
            *next += 1;
            *next
        };
        let is_shared = self.checkpoints.last().is_some_and(|(_, state)| Some(*state) == self.state);
        self.pages.values_mut().flatten().flatten().for_each(|page| *page = fresh());
        self.checkpoints.iter_mut().for_each(|(_, state)| *state = fresh());
        self.state = match self.checkpoints.last() {
            Some((_, state)) if is_shared => Some(*state),
            _ => self.state.map(|_| fresh()),
        };
    }

    fn ids(&self) -> BTreeSet<usize> {
        self.page_ids().chain(self.state).chain(self.checkpoints.iter().map(|(_, state)| *state)).collect()
    }

    fn page_ids(&self) -> impl Iterator<Item = usize> {
        self.pages.values().flatten().filter_map(|page| *page)
    }

    /// Compares a cache with this sequence, every value that is still stored.
    fn check(&self, cache: &KvCache, format: KvFormat) {
        assert_eq!(cache.len, self.tokens.len());
        for (i, (layer, kind)) in cache.layers.iter().zip(LAYERS).enumerate() {
            match kind {
                Kind::Recurrent(lens) => self.check_state(layer, lens),
                _ => {
                    for (part, shape) in PARTS[i].iter().enumerate() {
                        self.check_rows((i, part), part_of(layer, kind, part), format, *shape);
                    }
                }
            }
        }
    }

    fn check_rows(&self, place: (usize, usize), rows: &KvRows, format: KvFormat, shape: AuxiliaryShape) {
        let AuxiliaryShape { row: RowShape { heads, width }, tokens_per_row, .. } = shape;
        let pages = self.pages.get(&place).map_or(&[][..], |pages| pages);
        let stored: Vec<usize> = (0..pages.len()).filter(|page| pages[*page].is_some()).collect();
        assert_eq!((rows.len(), rows.stored_pages()), (self.tokens.len() / tokens_per_row, stored));
        let row_bytes = format.row_bytes(width);
        let mut wanted = vec![0; row_bytes];
        let mut values_of_row = vec![0.0; width.next_multiple_of(format.kind().block_len())];
        let all = rows.widened(rows.first_position()..rows.len(), width).unwrap();
        for at in rows.first_position()..rows.len() {
            let token = self.tokens[(at + 1) * tokens_per_row - 1];
            for head in 0..heads {
                let values: Vec<f32> = (0..width).map(|c| value(token, place.1, head, c)).collect();
                format.store(&values, &mut wanted);
                widen(format.kind(), &wanted, &mut values_of_row);
                let found = &all[((at - rows.first_position()) * heads + head) * width..][..width];
                assert_eq!(found, &values_of_row[..width], "layer and part {place:?}, row {at}, head {head}");
            }
        }
    }

    fn check_state(&self, layer: &LayerKv, lens: StateLens) {
        let mut state = layer.recurrent.clone();
        let mut found = Vec::new();
        state.take_in(1, lens, &layer.kept, |state, _| found = state.to_vec());
        let sum = self.tokens.iter().fold(0.0, |sum, token| (sum * 3.0 + *token as f32) % 1009.0);
        let last = self.tokens.last().map_or(0.0, |token| *token as f32);
        assert_eq!(found, [last, self.tokens.len() as f32, sum]);
    }
}

/// The pages of a part that are needed after `tokens` tokens.
fn pages_needed(shape: AuxiliaryShape, tokens: usize) -> Range<usize> {
    let rows = tokens / shape.tokens_per_row;
    let first = shape.first_needed(tokens).min(rows);
    first.min(rows / KV_PAGE_TOKENS * KV_PAGE_TOKENS) / KV_PAGE_TOKENS..rows.div_ceil(KV_PAGE_TOKENS)
}

/// Everything that all sequences together use.
fn usage(all: &[(KvCache, Naive)], format: KvFormat) -> KvUsage {
    let mut bytes = BTreeMap::new();
    let mut states = BTreeSet::new();
    for (_, naive) in all {
        for ((i, part), pages) in &naive.pages {
            let RowShape { heads, width } = PARTS[*i][*part].row;
            let size = heads * format.row_bytes(width);
            bytes.extend(pages.iter().filter_map(|page| *page).map(|id| (id, size * KV_PAGE_TOKENS)));
        }
        states.extend(naive.state.into_iter().chain(naive.checkpoints.iter().map(|(_, state)| *state)));
    }
    KvUsage { pages: bytes.len(), page_bytes: bytes.values().sum(), state_bytes: states.len() * 12 }
}

/// The numbers of pages and states of all sequences but one.
fn ids_but(all: &[(KvCache, Naive)], but: usize) -> BTreeSet<usize> {
    all.iter().enumerate().filter(|(i, _)| *i != but).flat_map(|(_, (_, naive))| naive.ids()).collect()
}

#[test]
fn a_thousand_sequences_are_those_in_plain_vectors() {
    for (seed, format) in [(1, KvFormat::F32), (2, KvFormat::F16), (3, KvFormat::Q8_0)] {
        let (mut rng, mut next, mut opened) = (Rng::new(seed), 0, 0);
        let mut below = |end: usize| rng.below(end);
        let pool = KvPool::new(format, POLICY, None, Default::default());
        let mut all: Vec<(KvCache, Naive)> = Vec::new();
        let (mut kept, mut partly, mut lost) = (0, 0, 0);
        while opened < 1000 {
            let (which, what) = (below(all.len().max(1)), below(11));
            match what {
                0 if all.len() < 12 => {
                    all.push((new_cache(&pool), Naive::default()));
                    opened += 1;
                }
                1 | 2 if !all.is_empty() && all.len() < 12 => {
                    let len = below(all[which].0.len + 2);
                    let mut naive = all[which].1.clone();
                    let fork = all[which].0.fork(len);
                    assert_eq!(fork.len, naive.truncate(len));
                    all.push((fork, naive));
                    opened += 1;
                }
                3 if !all.is_empty() => drop(all.swap_remove(which)),
                4 | 5 if !all.is_empty() => {
                    let (cache, naive) = &mut all[which];
                    let back = [3, 40, 700][below(3)];
                    let len = cache.len.saturating_sub(below(back));
                    let keep = cache.truncate(len);
                    assert_eq!(keep, naive.truncate(len));
                    kept += usize::from(keep == len && len > 0);
                    partly += usize::from(0 < keep && keep < len);
                    lost += usize::from(keep == 0 && len > 0);
                }
                6 if !all.is_empty() => {
                    let (cache, naive) = &mut all[which];
                    *cache = reloaded(cache, &pool);
                    naive.renumber(&mut next);
                    naive.wanted.clear();
                }
                7 if !all.is_empty() => {
                    let (cache, naive) = &mut all[which];
                    let mut positions: Vec<usize> = (0..below(4)).map(|_| 1 + below(cache.len + 400)).collect();
                    positions.extend(naive.pinned.first());
                    positions.sort_unstable();
                    positions.dedup();
                    cache.pin(positions.clone());
                    naive.wanted = positions;
                }
                _ if !all.is_empty() => {
                    let others = ids_but(&all, which);
                    let (cache, naive) = &mut all[which];
                    let most = [3, 60, 200][below(3)];
                    let count = 1 + below(most);
                    let tokens: Vec<u32> = (0..count).map(|_| below(1000) as u32).collect();
                    append(cache, &tokens);
                    tokens.iter().for_each(|token| naive.append(*token, &others, &mut next));
                    naive.release();
                }
                _ => {}
            }
            assert_eq!(pool.usage(), usage(&all, format), "seed {seed}, {opened} opened");
            let changed = which.min(all.len().saturating_sub(1));
            for (cache, naive) in all.get(changed).into_iter().chain(all.last()) {
                naive.check(cache, format);
            }
        }
        assert!(kept > 20 && partly > 20 && lost > 20, "{kept} kept, {partly} partly, {lost} lost");
        all.iter().for_each(|(cache, naive)| naive.check(cache, format));
        drop(all);
        assert_eq!(pool.usage(), KvUsage::default());
    }
}
