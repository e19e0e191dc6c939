//! The 32-bit Mersenne Twister (Matsumoto and Nishimura, 1998), the generator behind torch's CPU `randint`: shapes are
//! drawn by it so that figures measured here and by torch speak of the same lengths.

const N: usize = 624;
const M: usize = 397;

/// The generator; its state is one block of 624 words.
pub struct Mt19937 {
    state: [u32; N],
    next: usize,
}

impl Mt19937 {
    /// Seeded by the low 32 bits of `seed`, as torch's `manual_seed` does.
    pub fn new(seed: u64) -> Self {
        let mut state = [0; N];
        state[0] = (seed & 0xFFFF_FFFF) as u32;
        for i in 1..N {
            let previous = state[i - 1];
            state[i] = 1_812_433_253_u32.wrapping_mul(previous ^ (previous >> 30)).wrapping_add(i as u32);
        }
        Mt19937 { state, next: N }
    }

    /// The next word.
    pub fn next_u32(&mut self) -> u32 {
        if self.next == N {
            for i in 0..N {
                let y = (self.state[i] & 0x8000_0000) | (self.state[(i + 1) % N] & 0x7FFF_FFFF);
                let odd = if y & 1 == 1 { 0x9908_B0DF } else { 0 };
                self.state[i] = self.state[(i + M) % N] ^ (y >> 1) ^ odd;
            }
            self.next = 0;
        }
        let mut y = self.state[self.next];
        self.next += 1;
        y ^= y >> 11;
        y ^= (y << 7) & 0x9D2C_5680;
        y ^= (y << 15) & 0xEFC6_0000;
        y ^ (y >> 18)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The reference implementation's 10,000th word for its default seed (also in C++'s `std::mt19937`).
    #[test]
    fn the_ten_thousandth_word_is_the_published_one() {
        let mut g = Mt19937::new(5489);
        let last = (0..10_000).map(|_| g.next_u32()).last();
        assert_eq!(last, Some(4_123_659_995));
    }
}
