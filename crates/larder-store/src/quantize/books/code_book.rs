//! A code book, in which the entry with the least error for given values is found exactly.

/// For points that are no entry.
const NONE: u16 = u16::MAX;

/// Entries of `CELL` values, each at one of `LEVELS` levels. An entry has two halves, each one of `HALVES` combinations
/// of levels.
pub struct CodeBook<const CELL: usize, const LEVELS: usize, const HALVES: usize> {
    pub levels: [f32; LEVELS],
    /// The levels of each entry.
    pub entries: Vec<[f32; CELL]>,
    /// The number of the entry at each point, by its halves.
    points: Vec<u16>,
    /// For each first half, where its entries begin in `by_first`, and one more at the end.
    starts: Vec<u16>,
    /// The second half of each entry, and its number, ordered by the first halves.
    by_first: Vec<(u8, u16)>,
}

/// Errors of the values of a cell at each level, in excess of the least one.
pub type Excess<const CELL: usize, const LEVELS: usize> = [[f32; LEVELS]; CELL];

impl<const CELL: usize, const LEVELS: usize, const HALVES: usize> CodeBook<CELL, LEVELS, HALVES> {
    /// The code book of these entries, which number the levels of their values by fields of equal width, the first
    /// value in the lowest bits.
    pub fn new(packed: &[u16], levels: [i8; LEVELS]) -> Self {
        let width = if LEVELS > 4 { 3 } else { 2 };
        let numbers = |entry: &u16| -> [u32; CELL] {
            std::array::from_fn(|i| u32::from(entry >> (width * i)) & ((1 << width) - 1))
        };
        let levels = levels.map(f32::from);
        let mut order: Vec<_> = (0..).zip(packed).map(|(n, entry)| (Self::halves_of(&numbers(entry)), n)).collect();
        order.sort_unstable();
        let mut book = CodeBook {
            levels,
            entries: packed.iter().map(|entry| numbers(entry).map(|number| levels[number as usize])).collect(),
            points: vec![NONE; HALVES * HALVES],
            starts: (0..=HALVES).map(|half| order.partition_point(|([first, _], _)| *first < half) as u16).collect(),
            by_first: order.iter().map(|([_, second], number)| (*second as u8, *number)).collect(),
        };
        for ([first, second], number) in order {
            book.points[first * HALVES + second] = number;
        }
        book
    }

    /// The two halves of the levels that are nearest to the values of a cell.
    pub fn halves(&self, scale: f32, sizes: &[f32; CELL]) -> [usize; 2] {
        let mut numbers = [0; CELL];
        for pair in self.levels.windows(2) {
            let middle = scale * (pair[0] + pair[1]) / 2.0;
            for i in 0..CELL {
                numbers[i] += u32::from(sizes[i] > middle);
            }
        }
        Self::halves_of(&numbers)
    }

    /// The two halves with these numbers of levels.
    fn halves_of(numbers: &[u32; CELL]) -> [usize; 2] {
        let (first, second) = numbers.split_at(CELL / 2);
        [first, second].map(|half| half.iter().fold(0, |half, number| half * LEVELS + *number as usize))
    }

    /// The entry with the least excess, and that excess. `first` and `second` are the halves without any.
    pub fn nearest(&self, excess: &Excess<CELL, LEVELS>, [first, second]: [usize; 2]) -> (u16, f32) {
        let exact = self.points[first * HALVES + second];
        if exact != NONE {
            return (exact, 0.0);
        }
        let (firsts, seconds) = excess.split_at(CELL / 2);
        let (firsts, seconds) = (half_sums::<LEVELS, HALVES>(firsts), half_sums::<LEVELS, HALVES>(seconds));
        let mut best = (0, f32::INFINITY);
        let mut look = |half: usize| {
            let excess = firsts[half];
            if excess >= best.1 {
                return;
            }
            for (second, number) in &self.by_first[self.starts[half] as usize..self.starts[half + 1] as usize] {
                let excess = excess + seconds[*second as usize];
                if excess < best.1 {
                    best = (*number, excess);
                }
            }
        };
        // The half without any comes first, because others are skipped if they alone have more.
        look(first);
        (0..HALVES).for_each(look);
        best
    }
}

/// The sums of the excesses of half a cell for each combination of levels.
fn half_sums<const LEVELS: usize, const HALVES: usize>(excess: &[[f32; LEVELS]]) -> [f32; HALVES] {
    let mut sums = [0.0; HALVES];
    match excess {
        [a, b] => {
            for (sums, a) in sums.chunks_exact_mut(LEVELS).zip(a) {
                sums.iter_mut().zip(b).for_each(|(sum, b)| *sum = a + b);
            }
        }
        [a, b, c, d] => {
            let mut last = [[0.0; LEVELS]; LEVELS];
            for (last, c) in last.iter_mut().zip(c) {
                last.iter_mut().zip(d).for_each(|(sum, d)| *sum = c + d);
            }
            let last = last.as_flattened();
            let pairs = a.iter().flat_map(|a| b.iter().map(move |b| a + b));
            for (sums, pair) in sums.chunks_exact_mut(LEVELS * LEVELS).zip(pairs) {
                sums.iter_mut().zip(last).for_each(|(sum, last)| *sum = pair + last);
            }
        }
        _ => unreachable!("half a cell has two or four values"),
    }
    sums
}
